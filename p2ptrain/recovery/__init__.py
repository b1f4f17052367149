"""The rules of recovery: pure, no torch, no asyncio, no clock. Shells carry out what they say."""
