"""Darknet's .cfg files, so that the layers of YOLO and its relatives need not be typed."""
