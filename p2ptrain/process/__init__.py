"""Children of this process, and what the system lets them do."""
