"""Which part of a feature map each tile owns and needs: whole numbers only, no torch."""
