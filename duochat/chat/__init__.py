"""Conversations: text, templates, stop rules, an answer as it comes, and the process that the engine lives in."""
