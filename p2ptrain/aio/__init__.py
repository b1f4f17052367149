"""Helpers for asyncio: tasks with an owner, threads, mailboxes, the event loop."""
