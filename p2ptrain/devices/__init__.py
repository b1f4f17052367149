"""Where a stage's tensors live and its operators run: the processor, or an accelerator."""
