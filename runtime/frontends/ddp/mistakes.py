"""What a script does that cannot be done in place, made loud: each error says what was seen, and what to write."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from elastic import errors

ELSE = (
    "Or write the loop with job.steps(), where this can be said, or start the script with `elastic run --restart`, "
    "where all workers start it again when one is lost."
)


def made_late(thing: str) -> errors.ConfigError:
    return errors.ConfigError(
        f"{thing} was made after the first training batch. What is trained must be there before the loop, as a "
        "replacement that joins later copies it: make it before the first epoch"
    )


def copied_too_early(name: str) -> errors.ConfigError:
    return errors.ConfigError(
        f"{name} is a copy of weights, made in an epoch that was over when this worker joined: it has the weights with "
        "which this worker began, where the others have those of that epoch. Make a copy before the loop, `best = "
        "copy.deepcopy(model.state_dict())`, and replace it in the loop: newcomers get what the others have there"
    )


def read_ahead() -> errors.ReadAhead:
    return errors.ReadAhead(
        "the training loader was asked for a batch before the one it gave last had come to backward(). Each batch is a "
        "turn for one rank, whose gradients are reduced at the end of backward(): take one batch, call backward(), and "
        "then take the next, without prefetching or list(loader), and without `continue` before backward(). If this is "
        f"an evaluation, call model.eval() before the loop. {ELSE}"
    )


def other_loop() -> errors.NotInPlace:
    return not_in_place(
        "Taking more batches of a training loader after another loop over a DataLoader with a DistributedSampler has "
        "begun",
        "Let one loop end before the next one begins; an evaluation between two steps begins behind model.eval().",
    )


def behind_a_framework() -> errors.NotInPlace:
    return not_in_place(
        "A training loop over a DataLoader with a DistributedSampler, behind the loop of Trainer, Lightning or Keras,",
        "Make it a job of its own.",
    )


def in_turn(call: str, turn: str) -> errors.MidShardCollective:
    """turn: where the script is, as RankScript has it."""
    if turn == "unreduced":
        return errors.MidShardCollective(
            f"{call} was called behind a backward() under no_sync(), as that of an accumulated batch is. The other "
            "ranks, whose turns this worker may have to compute later, cannot answer before the last batch of a step. "
            "Call it behind the backward() of that one, with accelerate under `if accelerator.sync_gradients:`. "
            f"{ELSE}"
        )
    return errors.MidShardCollective(
        f"{call} was called between a batch and its backward(), where the other ranks, whose turns this worker may "
        "have to compute later, cannot answer yet. Call it behind optimizer.step(), or before the loop. SyncBatchNorm "
        f"does so in each forward: use BatchNorm, whose statistics are merged exactly. {ELSE}"
    )


def in_evaluation(call: str) -> errors.MidShardCollective:
    return errors.MidShardCollective(
        f"{call} came inside the loop of an evaluation, where other workers may be with other ranks' batches. "
        "Add up in the loop, and call it behind the loop; and let the loop run to its end, without `break`: take fewer "
        f"samples. {ELSE}"
    )


def mixed_in_evaluation(name: str) -> errors.NotInPlace:
    return not_in_place(
        f"{name}, which the loop of an evaluation changes by a value of the batch together with what gather() or "
        "reduce() has given,",
        "Gather the value of the batch, too.",
    )


def metric_of_one_rank(metric: str) -> errors.NotInPlace:
    return not_in_place(
        f"{metric}.update() of values of one rank, in the loop of an evaluation that gathers others,",
        "Give it what accelerator.gather_for_metrics() has given.",
    )


def other_calls_in_evaluation(call: str, other: str) -> errors.NotInPlace:
    return not_in_place(
        f"{call} in the loop of an evaluation, where another rank has called {other},",
        "Call the same collectives for each batch, and let none depend on what another one has given.",
    )


def unequal_in_evaluation(shapes: list[tuple[int, ...]]) -> errors.NotInPlace:
    return not_in_place(
        f"gather() of tensors of the shapes {shapes} in the loop of an evaluation",
        "Give it what accelerator.pad_across_processes() has given, with nothing between the two.",
    )


def collected(what: str) -> errors.NotInPlace:
    return not_in_place(
        f"{what}, over the batches of a DistributedSampler in an evaluation,",
        "Each worker has the batches of its own ranks there. Numbers, short tensors, and lists that get one number a "
        "batch become what all ranks have together, behind a `for` loop: add up in it, and begin with math.inf or "
        "-math.inf for the lowest or the highest number. Or evaluate all batches in each "
        "worker, with a DataLoader without a DistributedSampler.",
    )


def own_part(what: str) -> errors.NotInPlace:
    return not_in_place(
        f"{what} in a DataLoader without a DistributedSampler, as it gives this worker the samples of one rank alone, "
        "and those of the other ranks that it computes to nobody,",
        "Give the DataLoader sampler=DistributedSampler(dataset, shuffle=False), or a sampler or batch sampler with "
        "the attributes rank and num_replicas that looks at them in each __iter__. Or go through all samples in each "
        "worker. Indices that do not come from the rank may be a tuple, which is not looked at.",
    )


def two_backwards() -> errors.TwoBackwards:
    return errors.TwoBackwards(
        "a second backward() of a DistributedDataParallel model came in one turn, after the gradients of all ranks had "
        "been asked for. Add the losses up and call backward() once, or put all but the last one under "
        f"`with model.no_sync():`. {ELSE}"
    )


def left_turn() -> errors.LeftPass:
    return errors.LeftPass(
        "the training loop was left, by `break` or `return`, in a turn whose step is not over: other ranks' gradients "
        "are missing. What ends a loop has to be the same for all ranks: count steps by `enumerate(loader)` or by the "
        f"scheduler, and compare what dist.all_reduce() gives, not a rank's own loss. {ELSE}"
    )


def unreduced(batches: int, length: int) -> errors.LeftPass:
    return errors.LeftPass(
        f"the epoch ended after {batches} batches whose gradients were added up under no_sync() and never reduced: it "
        f"has {length} batches of each rank. Step on the last batch too, `if (i + 1) % every == 0 or i + 1 == "
        "len(loader)`, or leave the rest out: DataLoader(..., drop_last=True) with a fitting batch size."
    )


def left_gradient(name: str, where: str) -> errors.StrayGradient:
    return errors.StrayGradient(
        f"{name} still had a gradient of an earlier step when backward() began in {where}; torchrun would add it to "
        "this one. Call optimizer.zero_grad() in every step, also behind the last batch of an epoch."
    )


def unknown_batches(drawn: Sequence[str] = ()) -> errors.UnknownBatches:
    """drawn: the lines of the script that draw a batch, as script_files.drawn_by_hand gives them."""
    if drawn:
        target, _, call = drawn[-1].partition(": ")[2].partition(" = ")
        return errors.UnknownBatches(
            f"the script draws its batches itself, in {'; '.join(drawn)}; nobody knows which samples belong to which "
            "rank. Write `import elastic.ddp as ddp` and, before the loop, `batches = iter(ddp.batches(lambda: "
            f"{call}, steps=N))` with the number N of batches that a rank takes. In place of these lines write "
            f"`{target} = next(batches)`, each behind the backward() of the batch before. {ELSE}"
        )
    return errors.UnknownBatches(
        "backward() of a DistributedDataParallel model came outside of a loop over a DataLoader with a "
        "DistributedSampler: nobody knows which samples belong to which rank. Give the training DataLoader "
        "sampler=DistributedSampler(dataset), as torchrun needs it too. Where there is no DataLoader, use "
        "elastic.ddp.batches(). itertools.cycle(loader) keeps the batches of "
        "its first epoch, and asks no loader for others: write `while True: yield from loader` in a function instead. "
        f"{ELSE}"
    )


def counted(loop: str) -> errors.NotInPlace:
    return errors.NotInPlace(
        f"{loop} counts the turns of this loop, and a worker that computes two ranks has two turns a step. Iterate "
        "over the loader itself, `for i, batch in enumerate(loader):` with `if i == n: break`, or count in a variable, "
        f"`while step < n:`. {ELSE}"
    )


def goes_on(name: str, kind: str) -> errors.NotInPlace:
    return errors.NotInPlace(
        f"{name}, a {kind}, goes on in each turn of the training loop, and a worker that computes two ranks has two "
        "turns a step. Count in a number, `step += 1`, and compute from it what a step needs, as in "
        "`phases[step % len(phases)]`; draw random numbers from "
        f"the global generators of torch, numpy and Python, which are seeded for each step and rank. {ELSE}"
    )


def loader_goes_on(where: str, kind: str) -> errors.NotInPlace:
    """where: file and line at which it was asked."""
    return errors.NotInPlace(
        f"An iterator over a DataLoader without a DistributedSampler, a {kind}, asked at {where}, goes on in each turn "
        "of the training loop, and a worker that computes two ranks has two turns a step. Begin anew in each turn, "
        "`next(iter(loader))` with shuffle=True, which is seeded for each step and rank, or `for batch in loader:` to "
        f"the end; or give one DataLoader with a DistributedSampler a dataset that has both. {ELSE}"
    )


def forward_in_backward() -> errors.NotInPlace:
    return not_in_place(
        "A DistributedDataParallel model that sees its batch in backward() only, as checkpoint(model, x, "
        "use_reentrant=True) has it,",
        "Checkpoint the layers inside the model, or say use_reentrant=False.",
    )


def changed_buffer(why: errors.BufferChanged) -> errors.BufferChanged:
    return errors.BufferChanged(
        f"{why.names} changed in forward(). torchrun goes on with that of rank 0; here only BatchNorm's statistics are "
        "merged. Make it an average that the script updates behind optimizer.step(), or leave it as it is while "
        f"model.training. {ELSE}"
    )


def changed_in_step(why: errors.StateChanged) -> errors.StateChanged:
    """The same error for a script whose loop is run by a framework, so it has no `job`."""
    if not why.names:
        return why
    return errors.StateChanged(
        f"{why.names} changed while the ranks of a step were computed. Each worker computes other ranks, so their "
        "models would part. Change weights, learning rates and schedulers behind the optimizer's step, as in a "
        f"callback's method for the end of a step.{why.in_forward} {ELSE}"
    )


def changed_state(
    why: errors.StateChanged, rates: Mapping[str, tuple[object, object]], where: str
) -> errors.StateChanged:
    """rates: learning rates that have changed, from what to what. where: the script's frame that stood then."""
    values = "".join(f" ({name}: {was} before, {now} now)" for name, (was, now) in rates.items())
    return errors.StateChanged(
        f"{why.names} changed between a batch and its backward(), seen at {where}{values}, other than in the turn "
        'before, as by `group["lr"] *= 0.9` at the top of the loop: a worker that computes two ranks would do it twice '
        'a step. Compute a rate from a number that counts steps, `group["lr"] = lr * 0.9**step`, or change it behind '
        f"optimizer.step(); and leave weights to an optimizer. {ELSE}"
    )


def buffer_in_evaluation(name: str) -> errors.BufferChanged:
    return errors.BufferChanged(
        f"{name} changed in a loop over a DataLoader with a DistributedSampler and without gradients, in which each "
        "worker has other batches: their buffers would part. In an evaluation call model.eval() before the loop. For "
        "torch.optim.swa_utils.update_bn() use a DataLoader without a DistributedSampler, which gives each worker the "
        f"same batches. {ELSE}"
    )


def changed_data(name: str, elements: int) -> errors.NotInPlace:
    return errors.NotInPlace(
        f"{name}, a tensor of {elements:,} elements, was changed in a turn whose step is not over, and is too large to "
        f"be undone. Make it a buffer of the model, or change it before the loop or between epochs. {ELSE}"
    )


def averaged_early(name: str) -> errors.NotInPlace:
    return not_in_place(
        f"Changing {name}, an average of the weights, behind a backward() under no_sync()",
        "A newcomer that copies it meanwhile would lose that: update it behind optimizer.step().",
    )


def changed_by_hand() -> errors.NotInPlace:
    return not_in_place(
        "Changing the weights without an optimizer's step()",
        "A turn that is not the last of its step would change them too: use an optimizer of torch.optim, or one of a "
        "class that is derived from torch.optim.Optimizer.",
    )


def not_in_place(what: str, instead: str) -> errors.NotInPlace:
    return errors.NotInPlace(f"{what} does not work with logical ranks. {instead} {ELSE}")


def never_trained() -> errors.UnknownBatches:
    return errors.UnknownBatches(
        "the script has ended without one step: no DistributedDataParallel model has seen a training batch of a "
        "DataLoader with a DistributedSampler, or that accelerate has prepared. Is the dataset empty, or were no "
        "epochs asked for? A script that only evaluates runs with python or torchrun. A library's own loop is not "
        f"known here; write the loop with DataLoader(dataset, sampler=DistributedSampler(dataset)). {ELSE}"
    )


def over_before(epoch: int, entry: int) -> errors.ConfigError:
    return errors.ConfigError(
        f"the script was over in epoch {epoch}, and the checkpoint from which it goes on is of epoch {entry}. A script "
        "that goes on passes by the epochs which are over, with one batch of each. So start it with as many epochs as "
        "before; and what ends its loop must come from an evaluation or from dist.all_reduce() between two epochs, "
        "whose results are known, not from the losses of the epoch's own batches. Or start anew with --fresh."
    )


def snapshot_ahead(number: int, entry: int) -> errors.ConfigError:
    return errors.ConfigError(
        f"the script begins with epoch {number}, as after a snapshot of its own, and the newest checkpoint, from which "
        f"this job goes on, is of epoch {entry}: the rest of that epoch would be left out. Remove the snapshot, and "
        "the job goes on from its checkpoint; or begin anew from the snapshot with --fresh."
    )
