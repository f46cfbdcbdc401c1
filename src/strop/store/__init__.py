"""Where models, data and records are: on disk, in S3, on a hub or in a package, with digests.

`open_store` gives the store of an s3:// URI or a directory; `follow_store` says in which one hub ids are
looked for. `get_model` turns any name of a model into a directory that loads; `data_files` finds data.
This room lies under `record` and knows nothing of runs. How bytes reach this disk: `io`.
"""

from strop.store.contract import StoredObject, Transfer
from strop.store.models import ModelHandle, get_model
from strop.store.opening import open_store
from strop.store.policy import SourcePolicy, follow_store, is_offline, read_policy

__all__ = [
    "ModelHandle",
    "SourcePolicy",
    "StoredObject",
    "Transfer",
    "follow_store",
    "get_model",
    "is_offline",
    "open_store",
    "read_policy",
]
