"""The tensors of a folder by the names that a family gives them, and its tables apart."""

from torch import Tensor

from megatron.checkpoint.foreign.family import Family
from megatron.checkpoint.foreign.tensor_files import StoredTensor, TensorFiles


class NamedFiles:
    """Tensors under the names of a family; in the files the names may lack the family's prefix.

    Args:
        files: the tensors.
        family: family of the model.
    """

    def __init__(self, files: TensorFiles, family: Family) -> None:
        self._files = files
        bare = not any(name.startswith(family.base) for name in files.tensors)
        self._stored = {
            family.base + name if bare and name != "lm_head.weight" else name: name
            for name in files.tensors
            if not name.endswith(tuple(family.tables))
        }
        self.tables = {
            name: stored
            for name, stored in files.tensors.items()
            if name.endswith(tuple(family.tables))
        }

    @property
    def names(self) -> set[str]:
        """Names of all tensors."""
        return set(self._stored)

    def known(self, name: str) -> StoredTensor:
        """Return the file, shape and dtype of a tensor."""
        return self._files.tensors[self._stored[name]]

    def described(self) -> dict[str, StoredTensor]:
        """Return the file, shape and dtype of every tensor by name."""
        return {name: self.known(name) for name in self._stored}

    def read_table(self, name: str) -> Tensor:
        """Return a table."""
        return self._files.read(name)

    def read(self, name: str) -> Tensor:
        """Return a tensor."""
        return self._files.read(self._stored[name])
