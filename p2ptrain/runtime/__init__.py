"""Jobs: coordinator, holder and stage workers that carry out a plan."""
