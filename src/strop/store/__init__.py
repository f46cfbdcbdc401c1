"""Where bytes live: on disk, in S3, on a hub or in a package, with digests.

Places: `open_store` gives the store of an s3:// URI or a directory; `follow_store` says
which one hub ids are looked for in.
Models: `get_model` turns any name of a model into a directory that loads; `list_models`.
Data: `fetch_data_file`, `fetch_data_source`. What other tools sent, without a record: `listed`.
This room lies under `record` and knows nothing of runs. How bytes reach this disk: `io`.
"""

from strop.store.contract import StoredObject, Transfer
from strop.store.data_files import fetch_data_file, fetch_data_source
from strop.store.models import CachedModel, ModelHandle, get_model, list_models
from strop.store.opening import open_store
from strop.store.policy import SourcePolicy, follow_store, is_offline, read_policy

__all__ = [
    "CachedModel",
    "ModelHandle",
    "SourcePolicy",
    "StoredObject",
    "Transfer",
    "fetch_data_file",
    "fetch_data_source",
    "follow_store",
    "get_model",
    "is_offline",
    "list_models",
    "open_store",
    "read_policy",
]
