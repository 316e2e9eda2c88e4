"""The training text of the demo model depends only on its seed."""

import hashlib
from itertools import islice

from deploy.demo.training import corpus


def test_corpus_is_deterministic() -> None:
    assert list(islice(corpus.documents(7), 200)) == list(islice(corpus.documents(7), 200))
    assert list(islice(corpus.documents(7), 20)) != list(islice(corpus.documents(8), 20))


def test_corpus_of_a_seed_is_unchanged() -> None:
    """The training commands in the README reproduce the committed weights only from this text."""
    digest = hashlib.sha256()
    for document in islice(corpus.documents(1), 2000):
        digest.update(repr(document).encode())
    assert digest.hexdigest() == "edcbc11ce458c870634f82e177037bbd74807a5407ff2178dd3a8f65e541cff4"
