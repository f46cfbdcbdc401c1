from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from strop.errors import CheckRefused, ConfigError
from strop.spec import TrackersSpec, load_spec
from strop.spec.output import TRACKERS
from strop.train import measure
from strop.view.trackers import (
    EVENTS,
    GROUPS,
    KINDS,
    Row,
    TrackedRun,
    WandbTracker,
    flatten,
    group_of,
    name_metric,
    require_trackers,
)

# What earlier runs have recorded, one or more of each kind.
RECORDED = re.findall(
    r"\w+",
    """
accuracy accuracy_easy approx_kl_nats changed_frac clip_high_frac clip_low_frac common_reply_frac
correction_masked_frac correction_mean correction_truncated_frac distinct_reply_frac drift_max_nats
drift_mean_nats drift_p99_nats duplicate_frac effective_sample_frac entropy_nats failed_frac format_ok_frac
grad_norm grad_norm_rl grad_cosine judge_cached_frac judge_length_correlation loop_lag_s loop_late_frac loss
loss_sft lr master_changed_frac memory_bytes num_evicted_groups num_forwarded num_groups_ahead
num_optimizer_steps num_pair_tokens num_pairs num_positions num_refused_steps
num_scored_tokens num_sft_rows num_sft_tokens num_signal_tokens offpolicy_p99_nats pair_accuracy
pair_better_gain_nats pair_margin_nats peak_memory_bytes policy_entropy_nats policy_version
prefix_break_frac prompt_dependence prompt_too_long_frac ratio_p01 ratio_p50 ratio_p99 reference_kl_nats
refilled_frac reply_tokens_mean reply_tokens_mean_hard reward_mean reward_part_format runaway_frac
scored_tokens_per_s seconds_compute seconds_generate seconds_learn seconds_other seconds_step seconds_sync
seconds_verify staleness_max staleness_mean timed_out_frac truncated_frac unearned_reward_mean update_ratio
used_length_ratio wasted_token_frac zero_variance_frac
""",
)


def test_every_metric_of_the_record_falls_into_one_group() -> None:
    written = Path(measure.__file__).read_text("utf-8")
    literal = re.findall(r'metrics\["(\w+)"\]|^\s+"(\w+)": ', written, re.MULTILINE)
    names = {*RECORDED, *(name for pair in literal for name in pair if name)}
    assert len(names) > 70
    for name in names:
        fitting = {group for group, pattern in GROUPS if re.fullmatch(pattern, name)}
        assert len(fitting) == 1, (name, fitting)


def test_metrics_are_named_as_users_of_trackers_expect() -> None:
    assert name_metric("reward_mean") == "train/reward_mean"
    assert name_metric("seconds_step") == "time/seconds_step"
    assert name_metric("peak_memory_bytes") == "system/peak_memory_bytes"
    assert name_metric("reply_tokens_mean") == "rollouts/reply_tokens_mean"
    assert group_of("of_my_own") is None
    assert name_metric("of_my_own") == "train/of_my_own"
    # A part of a mixture may be called anything; MLflow takes few signs.
    assert name_metric("accuracy_a:b\n") == "train/accuracy_a_b_"


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text('name = "x"\ntask.name = "arithmetic"\n')
    return path


@pytest.mark.parametrize(
    ("word", "why"),
    [
        ('trackers.use=["comet"]', "strop knows no such tracker"),
        ('trackers.use=["wandb", "wandb"]', "named twice"),
        ("trackers.use=wandb", "a list of texts"),
        ('trackers.project="../up"', "is not allowed"),
        ("trackers.rollouts_every=0", "is not allowed"),
    ],
)
def test_bad_settings_are_refused(run_file: Path, word: str, why: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(why)):
        load_spec(run_file, [word])


def test_every_tracker_has_an_adapter_and_is_an_extra() -> None:
    assert tuple(KINDS) == TRACKERS
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text("utf-8")
    for name in TRACKERS:
        assert re.search(rf"^{name} = \[", text, re.MULTILINE), name


def test_a_missing_package_is_refused_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strop.view.trackers.find_spec", lambda name: None)
    for name in TRACKERS:
        with pytest.raises(CheckRefused, match=rf"pip install 'strop\[{name}\]'"):
            require_trackers(TrackersSpec(use=(name,)))
    require_trackers(TrackersSpec())


class Table:
    """As much of a wandb table as is asked for."""

    def __init__(self, *, columns: Sequence[str], data: Sequence[Sequence[object]]) -> None:
        self.content = columns, data


class FakeRun:
    def __init__(self, calls: list[tuple[Any, ...]]) -> None:
        self._calls = calls

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **named: self._calls.append((name, args, named))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What is asked of wandb."""
    made: list[tuple[Any, ...]] = []
    module: Any = ModuleType("wandb")
    module.Table = Table
    module.Settings = lambda **named: named

    def init(**named: Any) -> FakeRun:
        made.append(("init", (), named))
        return FakeRun(made)

    module.init = init
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.delenv("WANDB_DIR", raising=False)
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "")
    return made


TOLD = TrackedRun(
    name="tiny-1",
    project="study",
    folder=Path("/f"),
    config={"a": {"b": 1}},
    first_step=0,
    is_offline=True,
    finish_limit_s=7.0,
)


def test_wandb_is_asked_for_one_run_and_its_own_axis(calls: list[tuple[Any, ...]]) -> None:
    tracker = WandbTracker(TOLD)
    ((_, _, init), *defined) = calls
    assert {init["project"], init["name"], init["mode"], init["dir"]} == {"study", "tiny-1", "offline", "/f"}
    assert (init["id"], init["resume"], init["config"]) == (tracker.id, "allow", {"a": {"b": 1}})
    assert init["save_code"] is False
    assert (init["settings"]["console"], init["settings"]["finish_timeout"]) == ("off", 7.0)
    assert [args for _, args, _ in defined] == [("step",), ("*",)]
    tracker.log(3, {"train/loss": 0.5})
    assert calls[-1] == ("log", ({"step": 3, "train/loss": 0.5},), {})
    # The next attempt goes on under the same id, and is not told to be offline.
    WandbTracker(replace(TOLD, is_offline=False, id=tracker.id))
    again = next(named for name, _, named in reversed(calls) if name == "init")
    assert (again["id"], again["mode"]) == (tracker.id, None)


def test_wandb_gets_tables_and_alerts_of_alarms_alone(calls: list[tuple[Any, ...]]) -> None:
    tracker = WandbTracker(TOLD)
    rows: list[Row] = [
        {"kind": "notice", "cause": "mirror", "detail": "d", "is_alarm": 0.0},
        {"kind": "tripwire", "cause": "c" * 80, "detail": "e", "is_alarm": 1.0},
    ]
    tracker.table(EVENTS, 2, rows)
    (_, (logged,), _), (name, args, named) = calls[-2:]
    assert logged[EVENTS].content == (list(rows[0]), [list(row.values()) for row in rows])
    assert (name, args, named) == ("alert", ("c" * 63, "step 2: e"), {"level": "WARN"})
    tracker.finish(cause="Interrupted")
    assert calls[-1] == ("finish", (), {"exit_code": 1})


def test_without_a_key_wandb_is_refused_before_anything_is_asked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("strop.view.trackers.find_spec", lambda name: name)
    netrc = tmp_path / "netrc"
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(netrc))
    online = TrackersSpec(use=("wandb",))
    with pytest.raises(CheckRefused, match="export WANDB_API_KEY"):
        require_trackers(online)
    require_trackers(TrackersSpec(use=("wandb",), offline=True))
    for name, value in (("WANDB_API_KEY", "k"), ("WANDB_MODE", "offline"), ("STROP_OFFLINE", "1")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            require_trackers(online)
    netrc.write_text("machine api.wandb.ai login user password k\n")
    netrc.chmod(0o600)
    require_trackers(online)
    # A login at another server is none.
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org")
    with pytest.raises(CheckRefused, match="there is no key for it"):
        require_trackers(online)


def test_settings_are_flattened_for_mlflow() -> None:
    assert json.dumps(list(flatten({"a": {"b": 1, "c": [2]}, "d": "e"}))) == json.dumps(
        [("a.b", "1"), ("a.c", "[2]"), ("d", "e")]
    )
