"""The rules of recovery. Pure: no torch, asyncio or clock. Shells carry out what they return."""
