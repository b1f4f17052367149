"""Real devices that lose and suspect each other, timed: see tools/detection_times.py."""
