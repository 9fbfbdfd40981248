"""Fashion-MNIST over Flower with a fedpick policy; the model is plain NumPy."""
