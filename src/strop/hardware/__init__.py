"""This machine's resources, and strop's processes on it.

`describe_machine` reads CPUs, memory and GPUs; `calibrate_machine` measures speeds, `read_calibration` reads
them. `read_gpus` lists GPUs and MIG slices, `parse_visible_devices` returns those that a process sees,
`lease_gpus` divides them among the roles of a run and holds them, `clear_leftovers` cleans up after dead
runs. `spawn` and `terminate` run child processes that end with their parent and leave nothing behind. Not
here: placement of roles on devices (cluster), untrusted code (sandbox).
"""

from strop.hardware.calibrate import Calibration, calibrate_machine, read_calibration
from strop.hardware.disks import free_disk_bytes, require_writable
from strop.hardware.gpus import Gpu, read_gpus
from strop.hardware.leases import clear_leftovers, take_lease
from strop.hardware.machine import Machine, describe_machine, free_memory_bytes, peak_rss_bytes, rss_bytes
from strop.hardware.process import ChildProcess, spawn, tail, terminate
from strop.hardware.tuning import importing, tune_process
from strop.hardware.visible_devices import DeviceForm, VisibleDevices, parse_visible_devices, share_out

__all__ = [
    "Calibration",
    "ChildProcess",
    "DeviceForm",
    "Gpu",
    "Machine",
    "VisibleDevices",
    "calibrate_machine",
    "clear_leftovers",
    "describe_machine",
    "free_disk_bytes",
    "free_memory_bytes",
    "importing",
    "parse_visible_devices",
    "peak_rss_bytes",
    "read_calibration",
    "read_gpus",
    "require_writable",
    "rss_bytes",
    "share_out",
    "spawn",
    "tail",
    "take_lease",
    "terminate",
    "tune_process",
]
