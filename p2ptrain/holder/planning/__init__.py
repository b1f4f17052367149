"""From a wish for another plan to devices that are ready for it."""
