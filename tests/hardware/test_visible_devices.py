"""The forms of CUDA_VISIBLE_DEVICES, and roles that share what it shows."""

from __future__ import annotations

import pytest

from strop.errors import ConfigError
from strop.hardware import DeviceForm, VisibleDevices, parse_visible_devices, share_out

OLD_SLICE = "MIG-GPU-5d5ba0d6-d33d/7/0"


@pytest.mark.parametrize(
    ("text", "form", "ids"),
    [
        (None, DeviceForm.UNSET, ()),
        ("", DeviceForm.NONE, ()),
        ("-1", DeviceForm.NONE, ()),
        ("NoDevFiles", DeviceForm.NONE, ()),
        ("0,3", DeviceForm.INDEX, ("0", "3")),
        (" 2, 3 ", DeviceForm.INDEX, ("2", "3")),
        ("GPU-5d5ba0d6,GPU-6e6c", DeviceForm.GPU_UUID, ("GPU-5d5ba0d6", "GPU-6e6c")),
        ("MIG-c6d4f1ef-42e4", DeviceForm.MIG_UUID, ("MIG-c6d4f1ef-42e4",)),
        (OLD_SLICE, DeviceForm.MIG_UUID, (OLD_SLICE,)),
    ],
)
def test_every_form_is_read_as_names(text: str | None, form: DeviceForm, ids: tuple[str, ...]) -> None:
    assert parse_visible_devices(text) == VisibleDevices(form=form, ids=ids)


@pytest.mark.parametrize("text", ["0,GPU-5d5b", "1,2,1", "0,-1,2", "0,,2", "cuda:0", "MIG-"])
def test_what_cuda_would_cut_short_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=f"CUDA_VISIBLE_DEVICES={text} "):
        parse_visible_devices(text)


def test_prc_7_roles_get_slices_of_what_is_inherited() -> None:
    """Incident: a launcher overwrote the inherited list with 0 to n - 1, and took other jobs' GPUs."""
    visible = parse_visible_devices("2,3,5")
    shares = share_out(visible, {"infer": 1, "train": 1})
    assert {role: share.text for role, share in shares.items()} == {"infer": "2", "train": "3"}
    # An environment role without a GPU sees none, and not all.
    assert share_out(visible, {"train": 3, "environment": 0})["environment"].text == ""
    assert parse_visible_devices(None).text is None
