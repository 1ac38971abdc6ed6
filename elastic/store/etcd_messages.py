"""etcd's messages and stubs, from the package etcd3 0.12, under the compiled protobuf.

The generated modules of that release build their descriptors in a way protobuf refuses since version 4. The same
descriptors, read from those files as bytes, are put into a pool of their own and the message classes made from it;
modules that hold these take the place of the generated ones before etcd3 is imported.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from google.protobuf import descriptor_pool, message_factory
from google.protobuf.internal import enum_type_wrapper


def _serialized_descriptor(path: Path) -> bytes:
    """The value of serialized_pb= in a module of protobuf's old generator, read without running it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.keyword) and node.arg == "serialized_pb":
            if isinstance(node.value, ast.Call):
                return bytes(ast.literal_eval(node.value.args[0]).encode("latin1"))
            return bytes(ast.literal_eval(node.value))
    raise ImportError(f"{path} holds no serialized_pb; elastic needs etcd3 0.12")


def _load_etcd3() -> ModuleType:
    if "etcd3" in sys.modules:
        return sys.modules["etcd3"]
    spec = importlib.util.find_spec("etcd3")
    if spec is None or not spec.submodule_search_locations:
        raise ImportError("the package etcd3 is not installed")
    folder = Path(next(iter(spec.submodule_search_locations))) / "etcdrpc"
    pool = descriptor_pool.DescriptorPool()
    for name in ("kv", "auth", "rpc"):  # rpc.proto imports the other two
        pool.AddSerializedFile(_serialized_descriptor(folder / f"{name}_pb2.py"))
        module = ModuleType(f"etcd3.etcdrpc.{name}_pb2")
        file = pool.FindFileByName(f"{name}.proto")
        for message_name, message in file.message_types_by_name.items():
            setattr(module, message_name, message_factory.GetMessageClass(message))
        for enum_name, enum in file.enum_types_by_name.items():
            setattr(module, enum_name, enum_type_wrapper.EnumTypeWrapper(enum))
        sys.modules[module.__name__] = module
    return importlib.import_module("etcd3")


etcd3: Any = _load_etcd3()
rpc: Any = importlib.import_module("etcd3.etcdrpc")
