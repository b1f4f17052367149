"""The planners of the papers, and those that one would build by hand."""
