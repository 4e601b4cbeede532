"""An OpenAI-compatible HTTP server around a manager. Needs the extra `legato[serve]`."""
