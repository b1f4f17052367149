"""the cost model and drafts."""
