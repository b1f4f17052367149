"""The planners of the papers, and those that people would build by hand."""
