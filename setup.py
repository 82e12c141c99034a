"""Packaging of tfpara. The recipes (`models`, `input`, `scripts`) run from a checkout instead."""

from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
_version: dict[str, str] = {}
exec((ROOT / "tfpara" / "version.py").read_text(), _version)
_readme = ROOT / "README.md"

setup(
    name="tfpara",
    version=_version["__version__"],
    description="Keras models trained in parallel, synchronised every few minibatches",
    long_description=_readme.read_text() if _readme.exists() else "",
    long_description_content_type="text/markdown",
    author="The tfpara developers",
    license="Apache-2.0",
    license_files=["LICENSE"],
    keywords="tensorflow keras distributed training local-sgd bmuf easgd diloco model-averaging",
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "License :: OSI Approved :: Apache Software License",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    packages=find_packages(include=["tfpara", "tfpara.*"]),
    package_data={"tfpara": ["py.typed"]},
    python_requires=">=3.10",
    install_requires=["tensorflow>=2.17", "keras>=3.5", "numpy", "absl-py", "tensorboard"],
    extras_require={
        # eSpeak NG, which espeakng-loader carries, is GPL-3: never a dependency of the library.
        "speech": [
            "espeakng-loader",
            "kaldi-native-fbank>=1.23",
            "kaldiio",
            "soundfile",
            "soxr",
            "tqdm",
        ],
        "io": ["tensorflow-io"],
        "plot": ["matplotlib"],
        # The digits of scripts.study --suite=replicas.
        "study": ["matplotlib", "scikit-learn"],
        # docs/engines/ray.md and spark.md. With TensorFlow 2.17 Ray also needs pyarrow<22.
        "ray": ["ray[train]"],
        "spark": ["pyspark", "spark-tensorflow-distributor"],
        "test": [
            "pytest",
            "pytest-timeout",
            "pytest-xdist",
            "hypothesis",
            "ruff",
            "mypy",
            # Schemas for docs/engines/kubernetes.
            "kubeflow-trainer-api",
            "pydantic>=2.12",
            "pyyaml",
        ],
    },
    entry_points={
        "console_scripts": [
            "tfpara-launch = tfpara.launch:main",
            "tfpara-meet = tfpara.launch.meet:main",
            "tfpara-plan = tfpara.plan:main",
        ]
    },
)
