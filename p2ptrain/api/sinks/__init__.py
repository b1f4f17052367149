"""Where the events of a run go besides its readers: log files, trackers, a command."""
