"""The only place that reads or changes the process environment: device masks, Ray, threads, interfaces."""

from __future__ import annotations

import os
import secrets
import sys

DEVICE_MASKS = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
DEBUG_SWITCH = "DSV4_DEBUG"


def debug_wanted() -> bool:
    """Whether the user set DSV4_DEBUG, for tracebacks and debug logs; empty and 0 mean no."""
    return os.environ.get(DEBUG_SWITCH, "0") not in ("", "0")


def device_masks() -> dict[str, str]:
    """The visible-device variables that are set, by name."""
    return {name: os.environ[name] for name in DEVICE_MASKS if name in os.environ}


def fold_rocr_mask() -> str | None:
    """Replace ROCR_VISIBLE_DEVICES by an equal HIP_VISIBLE_DEVICES; Ray refuses to work with the former.

    HIP counts inside what ROCR leaves visible, so with both set the result is their composition. Call before the
    first `import ray`. Returns one line saying what changed, or None. An entry of HIP that is no index into ROCR's
    list (a UUID, or out of range) is kept as it is.
    """
    rocr = os.environ.pop("ROCR_VISIBLE_DEVICES", None)
    if rocr is None:
        return None
    hip = os.environ.get("HIP_VISIBLE_DEVICES")
    visible = [entry.strip() for entry in rocr.split(",") if entry.strip()]
    if hip is None:
        chosen = visible
    else:
        entries = [entry.strip() for entry in hip.split(",") if entry.strip()]
        chosen = [visible[int(e)] if e.isdigit() and int(e) < len(visible) else e for e in entries]
    os.environ["HIP_VISIBLE_DEVICES"] = ",".join(chosen)
    was = "" if hip is None else f" (HIP_VISIBLE_DEVICES was {hip})"
    return f"ROCR_VISIBLE_DEVICES={rocr} replaced by HIP_VISIBLE_DEVICES={','.join(chosen)}{was}: Ray refuses ROCR"


def ray_address() -> str | None:
    """The cluster that RAY_ADDRESS names; None when it is unset or empty."""
    return os.environ.get("RAY_ADDRESS") or None


def prepare_private_ray() -> None:
    """Set what a Ray instance of this process alone needs: loopback only, its own token, no reports.

    Without the switch for loopback Ray listens on the machine's outside address even for a private instance; it is read
    when ray is imported. Without a token in the environment Ray, which wants one for every new cluster, writes one into
    the home directory. Values that the user set are kept.
    """
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_SCHEDULER_EVENTS", "0")
    if "ray" not in sys.modules:  # an imported Ray may have read a token already, which a new one would contradict
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))


def set_thread_count(threads: int) -> None:
    """Limit the CPU threads of libraries that are loaded after this call; values below 1 count as 1."""
    os.environ["OMP_NUM_THREADS"] = str(max(1, threads))


def set_collective_interface(name: str) -> None:
    """Bind gloo, NCCL and RCCL to one network interface, unless the user chose one."""
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(variable, name)


def keep_fp_fusion() -> None:
    """Have Triton go on fusing multiplications with additions, as it always has, unless the user has chosen.

    It will change its default, and until then warns wherever nobody has chosen. Before triton is imported.
    """
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
