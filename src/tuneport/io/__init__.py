"""Files in and out: lazy, streamed, atomic."""
