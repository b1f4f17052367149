"""from module and loss to a description."""
