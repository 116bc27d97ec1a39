"""Base class of this workflow's deduplicators."""

from data_juicer.ops.base_op import OP, Deduplicator

from .declarations import Declarations


class BatchedDeduplicator(Declarations, Deduplicator, interface=True):
    """A deduplicator that hashes rows in batches.

    Data-Juicer's `Deduplicator` hashes them one by one, and its overhead per row is twenty times the cost of a hash.
    """

    _batched_op = True

    def run(self, dataset, *, exporter=None, tracer=None, reduce: bool = True):
        """Run like `Deduplicator.run`, but hash rows in batches."""
        dataset = OP.run(self, dataset).map(
            self.compute_hash,
            num_proc=self.runtime_np(),
            batch_size=self.batch_size,
            with_rank=self.use_cuda(),
            desc=f"{self._name}_compute_hash",
        )
        if not reduce:
            return dataset
        dataset, pairs = self.process(dataset, tracer.show_num if tracer else 0)
        if tracer:
            tracer.trace_deduplicator(self._name, pairs)
        return dataset
