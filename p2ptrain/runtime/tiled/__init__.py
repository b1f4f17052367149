"""A first stage that several devices compute in tiles of its maps (docs/internals/tiling.md)."""
