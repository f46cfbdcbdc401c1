"""From `sft.source` to the demonstrations of a run, read before anything heavy happens."""

from __future__ import annotations

from pathlib import Path

from strop.errors import DataError, explain_refusal
from strop.policy.footprint import read_model_size
from strop.record.run_dir import STATE_NAME
from strop.spec.run import RunSpec
from strop.store.data_files import DataFile, locate_named, note_data_file
from strop.tasks import Task
from strop.tasks.prompt import resolve_prompt_format
from strop.tokenizer import Tokenizer
from strop.train.demonstrations import Demonstrations, Framing, require_enough


def read_demonstrations(spec: RunSpec, task: Task, model_dir: Path) -> Demonstrations | None:
    """Read what a run imitates, framed as the run asks its model; None where it imitates nothing.

    Raises: DataError or StoreError for a source that is missing, malformed or left with fewer than a
        step takes; ConfigError if the model cannot be asked in the run's prompt format.
    """
    if not spec.has_demonstrations:
        return None
    # Here: they bring the environments, which the plan of a run that imitates nothing has no use for.
    from strop.train.rejection import read_run_demonstrations
    from strop.train.sft_rows import read_file_demonstrations

    source = spec.sft.source
    assert source is not None
    path = find_source(source)
    read = read_file_demonstrations if spec.sft.is_from_file else read_run_demonstrations
    found = read(spec.sft, path, read_framing(spec, task, model_dir))
    require_enough(found, spec.sft.rows_per_step)
    return found


def read_framing(spec: RunSpec, task: Task, model_dir: Path) -> Framing:
    """Return how the run asks its model.

    Raises: ConfigError if its tokenizer is missing, or it cannot be asked in the run's prompt format;
        StoreError if a file cannot be read.
    """
    tokenizer = Tokenizer.load(model_dir)
    return Framing(
        tokenizer=tokenizer,
        prompt_format=resolve_prompt_format(tokenizer, spec.model.prompt_format),
        task=task,
        max_positions=read_model_size(model_dir).max_positions,
    )


def find_source(source: str, *, setting: str = "sft.source") -> Path:
    """Return the file or the folder of a run that a setting names, fetched where it lies in a store.

    The files that imitating it takes are told to whoever collects data files.
    Raises: DataError if there is none; StoreErrors as `Store.get`.
    """
    path = locate_named(source)
    if not path.exists():
        raise DataError(
            explain_refusal(
                f"{setting}={source} does not exist",
                allowed="a file of JSONL or Parquet, or a folder of rollouts; a path, or a URI of a store",
                next_step=f"correct the path in {setting}",
            )
        )
    if path.is_dir():
        from strop.train.rejection import find_rollouts_files

        state = path / STATE_NAME
        for file in (*([state] if state.exists() else []), *find_rollouts_files(path)):
            name = file.relative_to(path).as_posix()
            note_data_file(DataFile(source=source, name=name, path=file, origin="disk"))
    return path
