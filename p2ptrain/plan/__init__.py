"""Planning as pure functions: profile and cluster in, plan out. No torch, no network."""
