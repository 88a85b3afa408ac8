#!/bin/sh
# Install dsv4dist, run from the checkout's root, into a Python that has its PyTorch already: neither PyTorch nor its triton is
# touched. For images and for nodes without containers.   PYTHON=python sh cluster/install.sh ["ray[default]==2.60.0"]
set -eu
python=${PYTHON:-python}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# A constraint turns any attempt to replace the vendor's builds into an error; pip would take PyPI's without a word.
"$python" - > "$work/vendor.txt" <<'PY'
import importlib.metadata as metadata

for name in ("torch", "triton", "pytorch-triton-rocm"):
    try:
        print(f"{name}=={metadata.version(name)}")
    except metadata.PackageNotFoundError:
        pass
PY
grep -q '^torch==' "$work/vendor.txt" || { echo "install.sh: $python has no PyTorch; install the one for your GPUs first" >&2; exit 1; }

"$python" - "$@" > "$work/requirements.txt" <<'PY'
import sys
import tomllib

with open("pyproject.toml", "rb") as file:
    wanted = tomllib.load(file)["project"]["dependencies"]
print(*[one for one in wanted if not one.startswith("torch")], *sys.argv[1:], sep="\n")
PY

"$python" -m pip install --no-cache-dir --constraint "$work/vendor.txt" --requirement "$work/requirements.txt"
"$python" -m pip install --no-cache-dir --no-deps .
"$python" -c 'import dsv4dist, ray, torch; print("dsv4dist on ray", ray.__version__, "and torch", torch.__version__)'
