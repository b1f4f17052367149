"""An nn.Module and its loss as a graph of units; a stage is a range of units."""
