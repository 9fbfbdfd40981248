"""Reading results: analysis, tables and pictures. Everything here is a function of the store alone."""
