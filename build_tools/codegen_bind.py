"""The C++ of `Signature::bind` and `VariantDesc::guard`: what a call must satisfy, made of the helpers of check.h.

All variants of one key (forms and archs) are bound once, by one function. What they agree on is checked there and
refuses the call; what only some of them need goes into the guards of those, and the runtime takes the next form.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .codegen_model import Kernel, Param, Variant
from .codegen_text import (
    cpp,
    cpp_bool,
    cpp_dtype,
    extents,
    outputs_asked,
    quoted,
    readable,
    symbol,
    symbols_in,
    tensor,
    tuple_of,
)
from .errors import CodegenError

_LIMITS = {"int32": "INT32_MAX", "int64": "INT64_MAX"}  # in rising order
_PARTS = ("shape", "strides")  # what a symbol is bound from; a size names a thing better than a stride does

Place = tuple[str, str, int]  # tensor, part, axis


class Binding:
    """The checks of one key of a kernel. `bind_body` is for its Signature, `guard_body` for each of its variants."""

    def __init__(self, kernel: Kernel, key: int) -> None:
        self.kernel = kernel
        self.variants = kernel.of_key(key)
        self.entries = {param.name: self._entries(param) for param in kernel.tensors}
        self.agreed = {
            (param.name, part): _agreed([extents(entry, part) for entry in self.entries[param.name]])
            for param in kernel.tensors
            for part in _PARTS
        }
        self.places = {name: self._places(name) for name in kernel.symbols}

    def bind_body(self) -> str:
        """The statements of the bind function; keys with equal texts share one."""
        checks = [*self._presence(), *self._bindings(), *self._shapes(), *self._requirements()]
        return "\n".join([*(f"  TK_RETURN_IF_ERROR({check});" for check in checks), "  return TK_OK;"])

    def guard_body(self, variant: Variant) -> str:
        """The statements of a variant's guard function; empty where bind already checks everything."""
        tests = [*self._own_shapes(variant), *self._own_limits(variant), *self._own_guards(variant)]
        if not tests:
            return ""
        return "\n".join([*(f"  if (!({test})) return {quoted(words)};" for test, words in tests), "  return nullptr;"])

    # ---- bind: what all variants of the key agree on ---------------------------------------------------------------

    def _presence(self) -> Iterator[str]:
        for param in self.kernel.tensors:
            entries = self.entries[param.name]
            if not entries:
                yield f"check_absent(frame, {tensor(param.name)})"
                continue
            dtypes = sorted({entry["dtype"] for entry in entries})
            settled = param.raw or param.name in self.kernel.accepts  # by the tables, before bind
            if len(dtypes) > 1 and not settled:
                raise CodegenError(
                    f"{self.kernel.name}: forms of one key must agree on dtypes, {param.name} is "
                    f"{' and '.join(dtypes)} in {', '.join(variant.id for variant in self.variants)}"
                )
            dtype = "none" if settled else cpp_dtype(dtypes[0])
            rank = len(entries[0]["shape"])
            flags = f"{cpp_bool(not self._is_required(param.name))}, {cpp_bool(param.written)}"
            yield f"check_tensor(frame, {tensor(param.name)}, DType::{dtype}, {rank}, {flags})"

    def _bindings(self) -> Iterator[str]:
        for part, function in zip(_PARTS, ("bind_dim", "bind_stride"), strict=True):
            for name, places in self.places.items():
                limit = _LIMITS[self._dtype(name)] if places else ""
                for index, (owner, found, axis) in enumerate(places):
                    if found == part and not any(self._is_always_there(earlier) for earlier, _, _ in places[:index]):
                        yield f"{function}(frame, {symbol(name)}, {tensor(owner)}, {axis}, {limit})"

    def _shapes(self) -> Iterator[str]:
        for param in self.kernel.tensors:
            for part, function in zip(_PARTS, ("check_shape", "check_strides"), strict=True):
                agreed = self.agreed[param.name, part]
                if all(text is None or self._binds(text, (param.name, part, axis)) for axis, text in enumerate(agreed)):
                    continue
                expected = ", ".join(self._expected(text, param.name) for text in agreed)
                words = tuple_of("any" if text is None else readable(text) for text in agreed)
                yield f"{function}(frame, {tensor(param.name)}, {{{expected}}}, {quoted(words)})"

    def _requirements(self) -> Iterator[str]:
        for guard in self.variants[0].guards:
            if self._is_shared(guard):
                test = self._when_known(guard, cpp(self.kernel, guard))
                yield f"check_guard(frame, {test}, {quoted(readable(guard))})"

    # ---- guards: what one variant needs beyond that ----------------------------------------------------------------

    def _own_shapes(self, variant: Variant) -> Iterator[tuple[str, str]]:
        for param in self.kernel.tensors:
            view = f"frame.tensors[{tensor(param.name)}]"
            if param.name not in variant.tensors:
                if self.entries[param.name]:
                    yield f"{view} == nullptr", f"{param.name} is None"
                continue
            entry = variant.tensors[param.name]
            if not entry["nullable"] and not self._is_required(param.name):
                yield f"{view} != nullptr", f"{param.name} is not None"
            for part, function in zip(_PARTS, ("shape_is", "stride_is"), strict=True):
                for axis, text in enumerate(extents(entry, part)):
                    if self.agreed[param.name, part][axis] is None and not self._binds(text, (param.name, part, axis)):
                        test = f"{function}({view}, {axis}, {cpp(self.kernel, text)})"
                        yield self._when_known(text, test), f"{param.name}.{part}[{axis}] == {readable(text)}"

    def _own_limits(self, variant: Variant) -> Iterator[tuple[str, str]]:
        for name, dtype in variant.symbols.items():
            if dtype != self._dtype(name):
                yield f"frame.symbols[{symbol(name)}] <= {_LIMITS[dtype]}", f"{name} <= 2147483647"

    def _own_guards(self, variant: Variant) -> Iterator[tuple[str, str]]:
        for guard in variant.guards:
            if not self._is_shared(guard):
                yield self._when_known(guard, cpp(self.kernel, guard)), readable(guard)

    # ---- facts -----------------------------------------------------------------------------------------------------

    def _entries(self, param: Param) -> list[Mapping[str, Any]]:
        entries = [variant.tensors[param.name] for variant in self.variants if param.name in variant.tensors]
        ranks = sorted({len(entry["shape"]) for entry in entries})
        if len(ranks) > 1:
            raise CodegenError(
                f"{self.kernel.name}: forms of one key must agree on ranks, {param.name} has "
                f"{' and '.join(map(str, ranks))} dimensions in {', '.join(variant.id for variant in self.variants)}"
            )
        return entries

    def _places(self, name: str) -> list[Place]:
        """Where a symbol gets its value, in the order in which that is tried: from sizes or, if it is none, strides."""
        for part in _PARTS:
            found = [
                (param.name, part, axis)
                for param in self.kernel.tensors
                for axis in range(len(self.agreed[param.name, part]))
                if any(extents(entry, part)[axis] == name for entry in self.entries[param.name])
            ]
            if found:
                return found
        return []

    def _binds(self, text: str, place: Place) -> bool:
        """Whether `text` is a symbol that gets its value right there, so that there is nothing to compare."""
        return self.places.get(text, [])[:1] == [place]

    def _dtype(self, name: str) -> str:
        """The widest type that a form has for the symbol."""
        found = [variant.symbols[name] for variant in self.variants if name in variant.symbols]
        return max(found, key=list(_LIMITS).index)

    def _is_shared(self, guard: str) -> bool:
        return all(guard in variant.guards for variant in self.variants)

    def _is_required(self, name: str) -> bool:
        """Whether no form takes null."""
        entries = self.entries[name]
        return len(entries) == len(self.variants) and not any(entry["nullable"] for entry in entries)

    def _is_always_there(self, name: str) -> bool:
        """Required, and there before outputs are allocated."""
        return self._is_required(name) and not self.kernel.param(name).written

    def _expected(self, text: str | None, owner: str) -> str:
        if text is None:
            return "kAny"
        value, known = cpp(self.kernel, text), self._known(text, owner)
        return f"{known} ? {value} : kAny" if known else value

    def _when_known(self, text: str, test: str) -> str:
        known = self._known(text, None)
        return f"!({known}) || {test}" if known else test

    def _known(self, text: str, owner: str | None) -> str:
        """The C++ test that all of `text` has a value; empty where that is certain (while tensor `owner` is there)."""
        unsure = [
            name
            for name in symbols_in(text, self.kernel)
            if not any(place[0] == owner or self._is_always_there(place[0]) for place in self.places[name])
        ]
        # an output that is not allocated yet has no dtype to ask for
        tests = [
            f"(!frame.check_only || frame.tensors[{tensor(name)}] != nullptr)"
            for name in outputs_asked(text, self.kernel)
        ]
        if unsure:
            tests.append(f"knows(frame, {' | '.join(f'1u << {symbol(name)}' for name in unsure)})")
        return " && ".join(tests)


def _agreed(rows: Sequence[Sequence[str]]) -> list[str | None]:
    """Per dimension the expression that all rows have, or None."""
    return [column[0] if len(set(column)) == 1 else None for column in zip(*rows, strict=True)]
