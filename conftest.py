"""What every example in a docstring or on a page may use without importing it."""

import pytest
import torch

import fullgraph


@pytest.fixture(autouse=True)
def names_in_examples(doctest_namespace):
    doctest_namespace.update(torch=torch, fullgraph=fullgraph, fg=fullgraph)
