"""Filters that balance captions: by their length, their n-grams, or clusters of CLIP embeddings.

    process:
      - length_balance_filter: {bucket_words: 5, keep_fraction: 0.5}
      - ngram_balance_filter: {words: 2, keep_fraction: 0.5}
      - cluster_balance_filter: {hf_clip: openai/clip-vit-base-patch32, clusters: 400, keep_fraction: 0.5}

- Length: most captions from the web are short. Nguyen et al. (Improving multimodal datasets with image captioning,
  2023, arXiv:2307.10350) and Li et al. (What if we recaption billions of web images, 2024, arXiv:2406.08478) study the
  effect of longer ones.
- N-grams: the balancing of MetaCLIP (Xu et al., Demystifying CLIP data, 2023, arXiv:2309.16671). At most about t
  captions are drawn for each entry, and a caption is kept if it is drawn for one of its entries. MetaCLIP takes entries
  from WordNet and Wikipedia; here they are the n-grams of the captions.
- Clusters: Vo et al. (Automatic data curation for self-supervised learning: a clustering-based approach, 2024,
  arXiv:2405.15613) balance data by sampling evenly over k-means clusters of their embeddings. Here k-means has one
  level.
"""

import base64
import logging
from collections import Counter
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
from data_juicer.ops.base_op import OPERATORS
from data_juicer.utils.mm_utils import remove_special_tokens
from data_juicer.utils.model_utils import get_model

from dj2mgm.data.images import load_image
from dj2mgm.data.texts import normalize_words, separate_words
from dj2mgm.juicer.operators.batched_image_text_similarity_filter import CLIP_DESCRIPTION, DEFAULT_CLIP, load_clip
from dj2mgm.juicer.operators.declarations import (
    NO_GROUP,
    BalanceFilter,
    Decision,
    Rows,
    SelectionFilter,
    argument,
    draw,
)
from dj2mgm.storage.streaming import DiskMap


@OPERATORS.register_module("length_balance_filter")
class LengthBalanceFilter(BalanceFilter):
    """A filter that keeps equally many rows of each bucket of caption lengths, as far as the bucket has them.

    The stat `caption_words_from` is the smallest number of words in the row's bucket.
    """

    stat = "caption_words_from"

    bucket_words: int = argument(5, "width of a bucket; 5 stands for captions of 0 to 4 words, 5 to 9, and so on")

    def assign_groups(self, rows: Rows) -> np.ndarray:
        words = (len(separate_words(remove_special_tokens(row[self.text_key])).split()) for row in rows)
        return np.fromiter(words, dtype=np.int64, count=len(rows)) // self.bucket_words * self.bucket_words


STAT = "ngram_limit"
AT_ONCE = 1000  # rows


def find_ngrams(text: str, words: int) -> list[str]:
    """Return the distinct n-grams of a caption, in order. A shorter caption is one n-gram."""
    tokens = separate_words(normalize_words(remove_special_tokens(text))).split()
    grams = (" ".join(tokens[start : start + words]) for start in range(max(1, len(tokens) - words + 1)))
    return list(dict.fromkeys(grams))


@OPERATORS.register_module("ngram_balance_filter")
class NgramBalanceFilter(SelectionFilter):
    """A filter that keeps captions drawn for at least one of their n-grams, about equally many for each n-gram.

    A caption is drawn with probability t/c for an n-gram of `c` captions. The limit t follows from the number of rows
    to keep. The stat `ngram_limit` is the lowest limit that keeps the row.
    """

    words: int = argument(2, "number of words in an n-gram")

    def decide(self, rows: Rows, folder: Path) -> Decision:
        # u < t/c must hold for one n-gram, where u is the row's draw for it: t must exceed the least u·c
        captions = DiskMap()  # n-gram -> captions that have it
        for part in self._iterate_ngrams(rows):
            captions.add(Counter(gram for grams in part for gram in grams).items())
        ids, limits = (row["id"] for row in rows), []
        for part in self._iterate_ngrams(rows):
            counts = {gram: captions.get(gram) for grams in part for gram in grams}
            for grams, row in zip(part, ids, strict=False):
                limits.append(min(draw(self.seed, self._name, row, gram) * counts[gram] for gram in grams))
        values = np.array(limits)
        is_kept = np.zeros(len(values), dtype=bool)
        is_kept[np.argsort(values, kind="stable")[: self.count_rows_to_keep(len(values))]] = True
        self.report = {"limit": round(float(values[is_kept].max(initial=0.0)), 3)}
        return Decision(is_kept, {STAT: values})

    def _iterate_ngrams(self, rows: Rows) -> Iterator[list[list[str]]]:
        """Yield the n-grams of `AT_ONCE` rows at a time."""
        texts = iter(rows)
        while part := [find_ngrams(row[self.text_key], self.words) for row in islice(texts, AT_ONCE)]:
            yield part


EMBEDDING_COLUMN = "__dj__clip_embedding"
SAMPLE_PER_CLUSTER = 256  # rows per cluster that k-means is fitted to, faiss's own default


@OPERATORS.register_module("cluster_balance_filter")
class ClusterBalanceFilter(BalanceFilter):
    """A filter that keeps equally many rows of each cluster of CLIP embeddings, as far as the cluster has them.

    Embeddings are unit vectors in 16 bits, in a column that is removed once the rows are selected. k-means (faiss, in
    one thread, so that the same seed gives the same clusters) is fitted to a sample. The stat `clip_cluster` is the
    number of the row's cluster. It is −1 for a row without an image, which is kept and not counted.
    """

    _accelerator = "cuda"
    stat = "clip_cluster"
    column = EMBEDDING_COLUMN

    hf_clip: str = argument(DEFAULT_CLIP, CLIP_DESCRIPTION)
    embed: str = argument("image", "'image' (the first image of a row) or 'text'")
    clusters: int = argument(400, "number of clusters, at most the number of rows")
    seed: int = argument(0, "seed of clusters and draws")
    batch_size: int = argument(128, "rows embedded together")

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.model_key = partial(load_clip, self.hf_clip)

    def compute_stats_batched(self, samples: dict, rank: int | None = None) -> dict:
        """Fill `EMBEDDING_COLUMN` with embeddings, as base64 of float16; rows without an image get an empty string."""
        image_lists = samples[self.image_key]
        rows = [row for row, images in enumerate(image_lists) if images]
        samples[EMBEDDING_COLUMN] = [""] * len(image_lists)
        if rows:
            clip = get_model(self.model_key, rank, self.use_cuda())
            if self.embed == "image":
                embeddings = clip.embed([image_lists[row][0] for row in rows], load_image)
            else:
                embeddings = clip.embed_texts([remove_special_tokens(samples[self.text_key][row]) for row in rows])
            for row, embedding in zip(rows, embeddings.astype(np.float16), strict=True):
                samples[EMBEDDING_COLUMN][row] = base64.b64encode(embedding.tobytes()).decode()
        return samples

    def assign_groups(self, rows: Rows) -> np.ndarray:
        embedded = np.fromiter((bool(row[EMBEDDING_COLUMN]) for row in rows), dtype=bool, count=len(rows))
        groups = np.full(len(rows), NO_GROUP, dtype=np.int64)
        if not embedded.any():
            return groups
        clusters = min(self.clusters, int(embedded.sum()))
        index = fit_clusters(
            self._sample_embeddings(rows, embedded, clusters * SAMPLE_PER_CLUSTER), clusters, self.seed
        )
        nearest = [index.search(part, 1)[1][:, 0] for part in _read_embeddings(rows, embedded)]
        groups[embedded] = np.concatenate(nearest)
        return groups

    def _sample_embeddings(self, rows: Rows, embedded: np.ndarray, count: int) -> np.ndarray:
        """Return the embeddings of the rows with the lowest draws, (up to `count`, D) float32."""
        draws = np.where(embedded, self.draw_rows(rows, "clusters"), np.inf)
        sampled = np.zeros(len(draws), dtype=bool)
        sampled[np.argsort(draws, kind="stable")[:count]] = True
        return np.concatenate(list(_read_embeddings(rows, sampled & embedded)))


def _read_embeddings(rows: Rows, mask: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the embeddings of the rows in `mask` in their order, (up to `AT_ONCE`, D) float32 each."""
    texts = (row[EMBEDDING_COLUMN] for row, is_selected in zip(rows, mask, strict=True) if is_selected)
    while part := list(islice(texts, AT_ONCE)):
        yield np.stack([np.frombuffer(base64.b64decode(text), dtype=np.float16) for text in part]).astype(np.float32)


def fit_clusters(sample: np.ndarray, clusters: int, seed: int):
    """Return a faiss index of `clusters` cluster centers, fitted to a sample (N, D) float32 with N ≥ `clusters`."""
    logging.getLogger("faiss.loader").setLevel(logging.WARNING)
    import faiss  # here because only recipes with this operator need it

    faiss.omp_set_num_threads(1)
    kmeans = faiss.Kmeans(
        sample.shape[1],
        clusters,
        seed=seed,
        init_method=faiss.ClusteringInitMethod_KMEANS_PLUS_PLUS,
        min_points_per_centroid=1,
        max_points_per_centroid=SAMPLE_PER_CLUSTER,
    )
    kmeans.train(sample)
    return kmeans.index
