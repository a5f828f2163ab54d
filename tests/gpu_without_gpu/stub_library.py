"""The library that stands in for CUDA, built from cuda_stub/ for the installed PyTorch."""

import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import torch

SOURCES = sorted(Path(__file__).with_name("cuda_stub").glob("*.[ch]"))
# Beside the packages that it is built for, so that it is deleted with them.
CACHE = Path(sys.prefix, "gpu_stub")
# PyTorch's libraries whose missing functions are generated.
LIBRARIES = ("c10_cuda", "torch_cuda", "torch_cuda_linalg", "torch_python", "caffe2_nvrtc")
ANSWERED = re.compile(r"(cuda[A-Z]|__cuda|cu[A-Z]|nccl|cublas)(?!File)")
DEFINED = re.compile(r"^(?:int|unsigned|size_t|void \**|const char \*)\s*(\w+)\(", re.MULTILINE)
# Functions that are looked up by name at run time, by PyTorch or by Triton's launcher.
LOOKED_UP = [
    "cuCtxGetLimit", "cuCtxPopCurrent", "cuCtxPopCurrent_v2", "cuCtxPushCurrent",
    "cuCtxPushCurrent_v2", "cuCtxSetLimit", "cuDeviceGetUuid", "cuFuncGetModule", "cuFuncLoad",
    "cuGetProcAddress_v2", "cuInit", "cuMemMap", "cuMemRetainAllocationHandle", "cuMemSetAccess",
    "cuMemUnmap", "cuMemsetD32Async", "cuModuleGetGlobal_v2", "cuModuleGetLoadingMode",
    "cuStreamGetCtx", "cuStreamWriteValue32", "cuTensorMapEncodeTiled",
    "nvmlDeviceGetGpuFabricInfoV", "nvmlDeviceGetHandleByPciBusId_v2", "nvmlInit", "nvmlInit_v2",
    "nvmlDeviceGetNvLinkRemoteDeviceType", "nvmlDeviceGetNvLinkRemotePciInfo_v2",
    "nvmlSystemGetCudaDriverVersion_v2",
]  # fmt: skip
# driver_types.h includes it, and the wheel of the runtime lacks it.
HOST_DEFINES = """
#define __device_builtin__
#define __device_builtin_texture_type__
#define __device_builtin_surface_type__
#define __host__
#define __device__
#define __align__(n) __attribute__((aligned(n)))
#define __builtin_align__(n) __align__(n)
#define CUDARTAPI
#define CUDART_CB
"""


def missing_requirement() -> str | None:
    """Name what this machine lacks for the stub, if anything."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is not a CUDA build"
    lacks = [name for name in ("cc", "nm", "c++filt") if shutil.which(name) is None]
    if lacks:
        return f"there is no {' and no '.join(lacks)}"
    return None if include_folder() else "there is no driver_types.h of the CUDA runtime"


def include_folder() -> Path | None:
    packages = Path(torch.__file__).parents[1]
    found = packages.glob("nvidia/*/include/driver_types.h")
    return next((path.parent for path in found), None)


def build() -> Path:
    """Return the folder of the library, under the names that are preloaded and looked up."""
    text = "".join(path.read_text() for path in [*SOURCES, Path(__file__)]) + torch.__version__
    folder = CACHE / hashlib.sha256(text.encode()).hexdigest()[:16]
    if folder.exists():
        return folder
    # Tests in several processes may build at a time: the first rename wins.
    CACHE.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE, ignore_cleanup_errors=True) as draft:
        compile_to(Path(draft))
        with suppress(OSError):
            Path(draft).rename(folder)
    return folder


def compile_to(folder: Path) -> None:
    """Compile the library into ``folder``, under all names."""
    (folder / "include/crt").mkdir(parents=True)
    (folder / "include/crt/host_defines.h").write_text(HOST_DEFINES)
    (folder / "generated.c").write_text(generated_functions())
    include = include_folder()
    assert include is not None, missing_requirement()
    sources = [folder / "generated.c", *(path for path in SOURCES if path.suffix == ".c")]
    flags = ["-O1", "-fPIC", "-shared", "-w", f"-I{folder}/include", f"-I{include}", "-lpthread"]
    subprocess.run(["cc", "-o", folder / "libcuda.so.1", *sources, *flags], check=True)
    # Triton links its launchers with -lcuda, and PyTorch loads NVML.
    for name in ("libcuda.so", "libnvidia-ml.so.1"):
        (folder / name).symlink_to("libcuda.so.1")


def generated_functions() -> str:
    """Return C: count the call and succeed, for each function that no source defines."""
    defined = {name for path in SOURCES for name in DEFINED.findall(path.read_text())}
    wanted = {name for name in undefined_symbols() if ANSWERED.match(name)} | {*LOOKED_UP}
    lines = ["int count_call(const char *kind, const char *name);"]
    for name in sorted(wanted - defined):
        kind = "nccl" if name.startswith("nccl") else "call"
        lines.append(f'int {name}(void) {{ return count_call("{kind}", "{name}"); }}')
    return "\n".join(lines) + "\n"


def undefined_symbols() -> set[str]:
    folder = Path(torch.__file__).parent / "lib"
    paths = [folder / f"lib{name}.so" for name in LIBRARIES]
    command = ["nm", "-D", "--undefined-only", *(path for path in paths if path.exists())]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    return {line.split()[-1].partition("@")[0] for line in lines if " U " in line}
