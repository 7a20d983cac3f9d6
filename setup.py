"""Install with `pip install -e .`; a CPU build of torch, installed first, is kept.

triton is not listed: CUDA builds of torch bring the one that fits them, and a machine without a
GPU needs none to generate.
"""

from pathlib import Path

from setuptools import setup

DEMO = Path("models/demo")
PACKAGES = (
    "minispec minispec.drafting minispec.verify minispec.kernels minispec.models "
    "minispec.models.demo"
)
TEST = ["pytest>=8", "transformers>=5.17", "accelerate", "compressed-tensors"]
TEST += ['triton>=3.6; platform_system == "Linux"']

setup(
    name="minispec",
    version="0.1.0",
    description="A from-scratch speculative-decoding engine for Kimi-K2.5 with EAGLE-3 draft trees",
    long_description=Path("README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=PACKAGES.split(),
    package_data={"minispec.models.demo": [str(p.relative_to(DEMO)) for p in DEMO.rglob("*.*")]},
    install_requires=["torch>=2.9", "numpy", "safetensors>=0.4", "sentencepiece>=0.2", "tiktoken"],
    extras_require={"test": TEST, "bench": ["matplotlib"]},
)
