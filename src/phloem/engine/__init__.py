"""The engine thread, its asyncio face, the offline engine and the detokeniser."""
