"""Models on disk: fetch what a reference names, convert it, compare vocabularies, list what is there."""
