"""the data: files, requests, plans."""
