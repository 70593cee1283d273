"""Making drafts for a target, and stand-in targets of another size."""
