"""The live view: a small web server that shows the experiments of a store while they run. It reads only the store."""
