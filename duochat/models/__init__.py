"""Models on disk: fetch what a reference names, convert it, compare vocabularies, list what is there."""

from duochat.models.catalog import list_models
from duochat.models.convert import require_target, target_folder
from duochat.models.fetch import cached, fetch
from duochat.models.local import list_local
from duochat.models.pair import check_pair
from duochat.models.store import Progress, cache_dir, weight

__all__ = [
    "Progress",
    "cache_dir",
    "cached",
    "check_pair",
    "fetch",
    "list_local",
    "list_models",
    "require_target",
    "target_folder",
    "weight",
]
