"""`elastic adopt` on one script, changed in one place at a time: what comes out, or which line is refused, and why."""

from __future__ import annotations

import ast
import textwrap
from typing import TypeAlias

import pytest

from elastic.adopt.adoption import Adoption, adopt, diff

Cases: TypeAlias = dict[str, tuple[list[tuple[str, str]], list[tuple[str, str]]]]
"""Name -> (what is changed, what is refused: (part of the line, part of the reason))."""

SCRIPT = """\
import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

dist.init_process_group("gloo")
model = make_model()
model = DDP(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=8, sampler=sampler)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        loss = cost(model(x), y)
        loss.backward()
        optimizer.step()
    tell(epoch)
dist.destroy_process_group()
"""

ADOPTED = """\
import os
import elastic
import torch

job = elastic.join(seed=0)
model = make_model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = job.loader(data, batch_size=8 * 4, shards=4, shuffle=True, tail="pad")
job.register(model=model, optimizer=optimizer)
for epoch in job.epochs(3):
    for step in job.steps(loader):
        optimizer.zero_grad()
        for x, y in step:
            loss = cost(model(x), y)
            loss.backward()
            step.log(loss=loss)
        optimizer.step()
    tell(epoch)
"""

PLAIN = """\
import torch
from torch.utils.data import DataLoader

torch.manual_seed(7)
model = make_model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(data, batch_size=8, shuffle=True)
for epoch in range(3):
    for x, y in loader:
        loss = cost(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(epoch, loss.item())
torch.save(model.state_dict(), "model.pt")
"""

ADOPTED_PLAIN = """\
import elastic
import torch

job = elastic.join(seed=0)
torch.manual_seed(7)
model = make_model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = job.loader(data, batch_size=8, shards=4, shuffle=True, tail="pad")
job.register(model=model, optimizer=optimizer)
for epoch in job.epochs(3):
    for step in job.steps(loader):
        optimizer.zero_grad()
        for x, y in step:
            loss = cost(model(x), y)
            loss.backward()
            step.log(loss=loss)
        optimizer.step()
    job.print(epoch, step.metrics["loss"])
if job.is_leader:
    torch.save(model.state_dict(), "model.pt")
"""

BACKWARD = "        loss.backward()\n"
STEP = "        optimizer.step()\n"
HEADER = "    for x, y in loader:\n"
ZERO = "        optimizer.zero_grad()\n"
LOSS = "        loss = cost(model(x), y)\n"
END = "    tell(epoch)\n"
MODEL = "model = make_model()\n"
START = 'dist.init_process_group("gloo")\n'
LOADER = "loader = DataLoader(data, batch_size=8, sampler=sampler)\n"
EPOCHS = "for epoch in range(3):\n"


def changed(*pairs: tuple[str, str], script: str = SCRIPT) -> str:
    """The script with each of these in the place of what it has."""
    for old, new in pairs:
        assert script.count(old) == 1, old
        script = script.replace(old, new)
    return script


def taken(script: str, ranks: int = 4) -> str:
    found = adopt(script, ranks)
    assert found.refusals == (), found.refusals
    ast.parse(found.text)
    return found.text


def test_the_script_is_adopted_line_by_line() -> None:
    assert taken(SCRIPT) == ADOPTED


def test_what_is_adopted_is_left_alone() -> None:
    assert adopt(ADOPTED, 4) == Adoption(ADOPTED, ())


# fmt: off
ACCEPTED: dict[str, tuple[list[tuple[str, str]], str]] = {
    "enumerate": (
        [(HEADER, "    for i, (x, y) in enumerate(loader):\n"), (STEP, STEP + "        tell(i)\n")],
        """\
        for step in job.steps(loader):
            optimizer.zero_grad()
            for x, y in step:
                loss = cost(model(x), y)
                loss.backward()
                step.log(loss=loss)
            i = step.index % len(loader)
            optimizer.step()
            tell(i)
        """,
    ),
    "enumerate from 1, read before the batch": (
        [
            (HEADER, "    for i, batch in enumerate(loader, start=1):\n"),
            (LOSS, "        rate = warm(i)\n        for group in optimizer.param_groups:\n"
             "            group['lr'] = rate\n        x, y = batch\n" + LOSS),
        ],
        """\
        for step in job.steps(loader):
            i = step.index % len(loader) + 1
            optimizer.zero_grad()
            rate = warm(i)
            for group in optimizer.param_groups:
                group['lr'] = rate
            for batch in step:
                x, y = batch
                loss = cost(model(x), y)
        """,
    ),
    "tqdm around and inside": (
        [("import os\n", "import os\nfrom tqdm import tqdm\n"),
         (HEADER, "    for i, (x, y) in enumerate(tqdm(loader, leave=False)):\n")],
        "    for step in tqdm(job.steps(loader), leave=False):\n",
    ),
    "tqdm with a name": (
        [("import os\n", "import os\nfrom tqdm import tqdm\n"),
         (HEADER, "    bar = tqdm(loader)\n    for x, y in bar:\n"),
         (STEP, STEP + "        bar.set_postfix(loss=loss.item())\n        bar.update(1)\n")],
        """\
        bar = tqdm(job.steps(loader))
        for step in bar:
            optimizer.zero_grad()
            for x, y in step:
                loss = cost(model(x), y)
                loss.backward()
                step.log(loss=loss)
            optimizer.step()
            bar.set_postfix(loss=step.metrics["loss"])
            bar.update(1)
        """,
    ),
    "zero_grad between loss and backward": (
        [(ZERO, ""), (BACKWARD, "        optimizer.zero_grad(set_to_none=True)  # anew\n" + BACKWARD)],
        """\
        for step in job.steps(loader):
            optimizer.zero_grad(set_to_none=True)  # anew
            for x, y in step:
                loss = cost(model(x), y)
                loss.backward()
        """,
    ),
    "zero_grad at the end": (
        [(ZERO, ""), (STEP, STEP + ZERO)],
        """\
        for step in job.steps(loader):
            for x, y in step:
                loss = cost(model(x), y)
                loss.backward()
                step.log(loss=loss)
            optimizer.step()
            optimizer.zero_grad()
        """,
    ),
    "clipping, a scaler and a scheduler": (
        [
            (LOADER, LOADER + "scaler = torch.amp.GradScaler()\nscheduler = make_scheduler(optimizer, len(loader))\n"),
            (LOSS, "        with torch.autocast('cpu'):\n    " + LOSS),
            (BACKWARD, "        scaler.scale(loss).backward()\n"),
            (STEP, "        scaler.unscale_(optimizer)\n        clip(model.parameters(), 1.0)\n"
                   "        scaler.step(optimizer)\n        scaler.update()\n        scheduler.step()\n"),
        ],
        """\
        job.register(model=model, optimizer=optimizer, scaler=scaler, scheduler=scheduler)
        for epoch in job.epochs(3):
            for step in job.steps(loader):
                optimizer.zero_grad()
                for x, y in step:
                    with torch.autocast('cpu'):
                        loss = cost(model(x), y)
                    scaler.scale(loss).backward()
                    step.log(loss=loss)
                scaler.unscale_(optimizer)
                clip(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
                scheduler.step()
        """,
    ),
    "ranks from the environment": (
        [(START, 'rank = int(os.environ["RANK"])\nlocal = int(os.getenv("LOCAL_RANK", 0))\n' + START
          + 'world = int(os.environ.get("WORLD_SIZE", "1"))\ntorch.cuda.set_device(local)\nrate = 0.1 * world\n'),
         (END, END + "    if rank == 0 and epoch:\n        torch.save(model.module.state_dict(), 'x.pt')\n")],
        """\
        job = elastic.join(seed=0)
        local = job.local_rank
        world = 4
        torch.cuda.set_device(local)
        rate = 0.1 * world
        """,
    ),
    "rank 0 saves the inner model": (
        [(END, END + "    if dist.get_rank() == 0:\n        torch.save(model.module.state_dict(), 'x.pt')\n")],
        """\
        tell(epoch)
        if job.is_leader:
            torch.save(model.state_dict(), 'x.pt')
        """,
    ),
    "names of the leader's own": (
        [(END, END + "    if dist.get_rank() == 0:\n        try:\n            a = ask()\n        except OSError as e:\n"
                     "            a = e\n        tell(a)\n    a = 1\n    tell(a)\n")],
        "    if job.is_leader:\n        try:\n            a = ask()\n",
    ),
    "the rank in words, and in questions": (
        [(START, START + "rank = dist.get_rank()\nfirst = rank == 0\n"),
         (END, "    if first:\n        print(f'{rank}: {epoch}')\n    if not rank:\n        tell(1)\n"
               "    if rank != 0 or epoch > 1:\n        tell(2)\n")],
        """\
        if job.is_leader:
            print(f'{job.rank}: {epoch}')
        if job.is_leader:
            tell(1)
        if not job.is_leader or epoch > 1:
            tell(2)
        """,
    ),
    "the loss summed over the ranks": (
        [(STEP, STEP + "        dist.all_reduce(loss)\n        loss /= dist.get_world_size()\n"
                       "        tell(loss.item())\n")],
        """\
                step.log(loss=loss)
            loss = torch.tensor(step.metrics["loss"])
            optimizer.step()
            loss *= 4
            loss /= 4
            tell(loss.item())
        """,
    ),
    "the mean over the ranks of a sum": (
        [(EPOCHS + "    sampler.set_epoch(epoch)\n", EPOCHS + "    sampler.set_epoch(epoch)\n    total = 0.0\n"),
         (STEP, STEP + "        total += loss.item()\n"),
         (END, "    mean = torch.tensor([total / len(loader)])\n    dist.all_reduce(mean, op=dist.ReduceOp.AVG)\n")],
        """\
        job.state.total = 0.0
        for step in job.steps(loader):
            optimizer.zero_grad()
            for x, y in step:
                loss = cost(model(x), y)
                loss.backward()
                step.log(loss=loss)
            optimizer.step()
            job.state.total += step.metrics["loss"]
        mean = torch.tensor([job.state.total / len(loader)])
        """,
    ),
    "counts": (
        [(EPOCHS, "seen, right = 0, 0\n" + EPOCHS),
         (LOSS, "        scores = model(x)\n        loss = cost(scores, y)\n"),
         (STEP, STEP + "        right += (scores.argmax(1) == y).sum().item()\n        seen += y.size(0)\n")],
        """\
                step.log(loss=loss, right=(scores.argmax(1) == y).sum().item(), y_size=len(y))
            optimizer.step()
            job.state.right += step.metrics["right"]
            job.state.seen += int(step.metrics["y_size"])
        """,
    ),
    "lengths, and a number with ranks in it": (
        [(STEP, STEP + "        tell(len(x), x.shape[0], y.size(0))\n"
                       "        tell((x.sum() / dist.get_world_size()).item())\n")],
        """\
                step.log(loss=loss, x_size=len(x), y_size=len(y), value=(x.sum() / 4).item())
            optimizer.step()
            tell(int(step.metrics["x_size"]), int(step.metrics["x_size"]), int(step.metrics["y_size"]))
            tell(step.metrics["value"])
        """,
    ),
    "numbers in f-strings": (
        [(STEP, STEP + '        tell(f"{loss.item():.3f}")\n        tell(f\'{loss.item():.3f}\')\n')],
        """\
            tell(f"{step.metrics['loss']:.3f}")
            tell(f'{step.metrics["loss"]:.3f}')
        """,
    ),
    "a list of losses, a best value, and something else beside them": (
        [(EPOCHS, "best, other, losses = float('inf'), make(), []\n" + EPOCHS),
         (STEP, STEP + "        losses.append(loss.item())\n"),
         (END, "    if losses[-1] < best:\n        best = losses[-1]\n    tell(other)\n")],
        """\
        other = make()
        job.state.setdefault(best=float('inf'), losses=[])
        """,
    ),
    "a counter of steps": (
        [(EPOCHS, "step = 0  # so far\n" + EPOCHS), (LOSS, "        tell(step)\n".replace("tell", "m = ask") + LOSS),
         (STEP, STEP + "        tell(step % 2)\n        step += 1\n        tell(step, step % 2)\n"),
         (END, END + "    tell(f'{step}')\n")],
        """\
        for epoch in job.epochs(3):
            for step in job.steps(loader):
                optimizer.zero_grad()
                m = ask(step.index)
                for x, y in step:
                    loss = cost(model(x), y)
                    loss.backward()
                    step.log(loss=loss)
                optimizer.step()
                tell(step.index % 2)
                tell(step.index + 1, (step.index + 1) % 2)
            tell(epoch)
            tell(f'{step.index + 1}')
        """,
    ),
    "a counter that is read before the batches": (
        [(EPOCHS, "n = 0\n" + EPOCHS), (HEADER, "    tell(n)\n" + HEADER), (STEP, STEP + "        n += 1\n")],
        """\
        job.state.setdefault(n=0)
        job.register(model=model, optimizer=optimizer)
        for epoch in job.epochs(3):
            tell(job.state.n)
        """,
    ),
    "names that job.state has itself": (
        [(EPOCHS, "items = 0\n" + EPOCHS), (STEP, STEP + "        items += 2\n")],
        "        job.state.items_ += 2\n",
    ),
    "a name that is taken": (
        [(EPOCHS, "step = job = 1\n" + EPOCHS), (END, "    tell(step, job)\n")],
        "    for this_step in this_job.steps(loader):\n",
    ),
    "a name of a script's loop that is a reserved word of step.log": (
        [(LOSS, "        mean = cost(model(x), y)\n"), (BACKWARD, "        mean.backward()\n")],
        "            step.log(mean_of_batch=mean)\n",
    ),
    "a clock": (
        [(EPOCHS, "import time\nstart = time.time()\n" + EPOCHS),
         (STEP, STEP + "        tell(time.time() - start)\n        start = time.time()\n")],
        "        start = time.time()\n",
    ),
    "epochs from 1": (
        [(EPOCHS, "for epoch in range(1, epochs + 1):\n")],
        "for epoch in job.epochs(epochs):\n    epoch += 1\n    for step in job.steps(loader):\n",
    ),
    "epochs from 1, without a sum": (
        [(EPOCHS, "for epoch in range(1, 5):\n")],
        "for epoch in job.epochs(4):\n    epoch += 1\n",
    ),
    "epochs with a bar": (
        [("import os\n", "import os\nfrom tqdm import tqdm\n"), (EPOCHS, "for epoch in tqdm(range(0, n)):\n")],
        "for epoch in tqdm(job.epochs(n)):\n",
    ),
    "one epoch, without a loop": (
        [(EPOCHS, "with torch.no_grad():\n    pass\nwith profile():\n"), ("    sampler.set_epoch(epoch)\n", ""),
         (END, "")],
        """\
        job.register(model=model, optimizer=optimizer)
        for step in job.steps(loader, epochs=1):
        """,
    ),
    "the sampler inside the loader": (
        [("sampler = DistributedSampler(data)\n", ""),
         (LOADER, "loader = DataLoader(\n    data,  # all of it\n    batch_size=args.batch // dist.get_world_size(),\n"
                  "    num_workers=2,\n    sampler=DistributedSampler(data, shuffle=False, seed=3),\n"
                  "    drop_last=True,\n"
                  "    collate_fn=glue,\n    pin_memory=True,\n)\n"),
         ("    sampler.set_epoch(epoch)\n", "    loader.sampler.set_epoch(epoch)\n")],
        "loader = job.loader(data, batch_size=(args.batch // 4) * 4, shards=4, seed=3, collate=glue, workers=2)\n",
    ),
    "drop_last by an option": (
        [(LOADER, "loader = DataLoader(data, 8, sampler=sampler, drop_last=args.drop)\n")],
        'loader = job.loader(data, batch_size=8 * 4, shards=4, shuffle=True, tail="drop" if args.drop else "pad")\n',
    ),
    "the loader's dataset": (
        [(END, "    tell(len(loader.dataset), len(loader))\n")],
        "    tell(len(data), len(loader))\n",
    ),
    "an evaluation with names of its own": (
        [(END, "    model.eval()\n    total = 0.0\n    for x, y in valid:\n        loss = cost(model(x), y)\n"
               "        total += loss.item()\n    model.train()\n    tell(total)\n")],
        """\
            optimizer.step()
        model.eval()
        total = 0.0
        for x, y in valid:
            loss = cost(model(x), y)
            total += loss.item()
        """,
    ),
    "strings of several lines, comments and blank lines in the body": (
        [(LOSS, '        # what it costs\n\n        loss = cost(model(x), y, """of\n  a batch""")  # so\n')],
        '            # what it costs\n\n            loss = cost(model(x), y, """of\n  a batch""")  # so\n',
    ),
    "a walrus, an annotation and a comprehension": (
        [(LOSS, "        loss: torch.Tensor = cost(model(x), [y for y in (z := y)])\n        assert z is y\n")],
        "            loss: torch.Tensor = cost(model(x), [y for y in (z := y)])\n",
    ),
    "another name for the wrapped model": (
        [("model = DDP(model)\n", "net = nn.parallel.DistributedDataParallel(module=model)\n"),
         ("import os\n", "import os\nimport torch.nn as nn\n"), ("SGD(model.", "SGD(model."),
         (LOSS, "        loss = cost(net(x), y)\n"), (END, "    save(net.module)\n")],
        "job.register(net=net, optimizer=optimizer)\n",
    ),
    "the model in the wrapper's own line": (
        [(MODEL, ""),
         ("model = DDP(model)\n", "model = DDP(\n    make_model(torch.device('cpu')),\n    bucket_cap_mb=1,\n)\n")],
        "model = make_model(torch.device('cpu'))\n",
    ),
    "a multi-line header": (
        [(HEADER, "    for x, y in (\n        loader  # in order: all\n    ):\n")],
        "    for step in (\n        job.steps(loader)  # in order: all\n    ):\n        optimizer.zero_grad()\n",
    ),
    "with around the loop": (
        [(HEADER, "    with profile() as p:\n     for x, y in loader:\n"), (ZERO, "      optimizer.zero_grad()\n"),
         (LOSS, "      loss = cost(model(x), y)\n"), (BACKWARD, "      loss.backward()\n"),
         (STEP, "      optimizer.step()\n")],
        "     for step in job.steps(loader):\n      optimizer.zero_grad()\n"
        "      for x, y in step:\n       loss = cost(",
    ),
    "the seed before the group": (
        [(START, "torch.manual_seed(3)\n" + START)],
        "job = elastic.join(seed=0)\ntorch.manual_seed(3)\nmodel = make_model()\n",
    ),
}
# fmt: on


@pytest.mark.parametrize("name", ACCEPTED)
def test_adopted(name: str) -> None:
    pairs, expected = ACCEPTED[name]
    shows(taken(changed(*pairs)), expected)


def shows(found: str, expected: str) -> None:
    """These lines, one behind the other, wherever they stand."""
    depths = [expected, *(textwrap.indent(textwrap.dedent(expected), " " * depth) for depth in (0, 4, 8))]
    assert any(lines in found for lines in depths), found


# fmt: off
REFUSED: Cases = {
    "no backward": ([(BACKWARD, "")], [("import os", "no loss.backward()")]),
    "two backwards": (
        [(BACKWARD, BACKWARD + "        other.backward()\n")],
        [("other.backward()", "a second backward()")],
    ),
    "no name for the loss": ([(BACKWARD, "        (loss / 2).backward()\n")], [("(loss / 2)", "has no name")]),
    "gradients as an argument": ([(BACKWARD, "        loss.backward(g)\n")], [("backward(g)", "has no name")]),
    "a closure": (
        [(LOSS + BACKWARD + STEP, "        def closure():\n    " + LOSS + "    " + BACKWARD
          + "            return loss\n        optimizer.step(closure)\n")],
        [("loss.backward()", "and the loop over the batches is not")],
    ),
    "no_sync": (
        [(LOSS + BACKWARD, "        with model.no_sync():\n    " + LOSS + "    " + BACKWARD)],
        [("model.no_sync", "accumulated")],
    ),
    "every second batch": (
        [(HEADER, "    for i, (x, y) in enumerate(loader):\n"), (STEP, "        if i % 2:\n    " + STEP)],
        [("optimizer.step()", "gradients are accumulated")],
    ),
    "backward under a condition": (
        [(BACKWARD, "        if loss > 0:\n    " + BACKWARD)], [("if loss > 0", "under a condition")],
    ),
    "next": (
        [(HEADER, "    it = iter(loader)\n    while True:\n        x, y = next(it)\n")],
        [("while True", "no loop over a DataLoader")],
    ),
    "a loop over something else": ([(HEADER, "    for x, y in batches:\n")], [("in batches", "is a DataLoader")]),
    "zip": ([(HEADER, "    for x, y in zip(loader, loader):\n")], [("zip(", "is a DataLoader")]),
    "a loader of two kinds": (
        [(LOADER, LOADER + "if big:\n    loader = DataLoader(big)\n")],
        [("in loader:", "one place")],
    ),
    "a loader in each epoch": (
        [(LOADER, ""), (HEADER, "    loader = DataLoader(data, batch_size=8, sampler=sampler)\n" + HEADER)],
        [("    loader = DataLoader", "anew in each epoch")],
    ),
    "epochs by while": (
        [(EPOCHS, "epoch = 0\nwhile epoch < 3:\n"), (END, "    epoch += 1\n")], [("while epoch", "not known")],
    ),
    "epochs from a snapshot": ([(EPOCHS, "for epoch in range(start, 3):\n")], [("range(start", "another one")]),
    "epochs from a list": ([(EPOCHS, "for epoch in [1, 2]:\n")], [("[1, 2]", "not counted by range()")]),
    "a loop around the epochs": (
        [(EPOCHS, "for fold in range(2):\n  for epoch in range(3):\n"),],
        [("for fold", "a loop around")],
    ),
    "break": ([(STEP, STEP + "        if done():\n            break\n")], [("break", "left before its end")]),
    "continue before backward": (
        [(LOSS, "        if bad(x):\n            continue\n" + LOSS)], [("continue", "left before its backward()")],
    ),
    "early stopping": ([(END, "    if done():\n        break\n")], [("break", "in its middle")]),
    "no zero_grad": ([(ZERO, "")], [("in loader:", "no optimizer.zero_grad()")]),
    "no step": ([(STEP, "")], [("in loader:", "no optimizer.step()")]),
    "a count before backward": (
        [(EPOCHS, "n = 0\n" + EPOCHS), (LOSS, "        n += 1\n" + LOSS)], [("n += 1", "from batch to batch")],
    ),
    "a hidden state": (
        [(EPOCHS, "h = None\n" + EPOCHS), (LOSS, "        out, h = model(x, h)\n        loss = cost(out, y)\n")],
        [("model(x, h)", "h goes on from batch to batch")],
    ),
    "print before backward": (
        [(BACKWARD, "        print(loss.item())\n" + BACKWARD)],
        [("print", "is called before backward()")],
    ),
    "a meter before backward": (
        [(BACKWARD, "        meter.update(loss.item())\n" + BACKWARD)], [("meter", "is called before backward()")],
    ),
    "an attribute set before backward": (
        [(LOSS, LOSS + "        model.rate = 1\n")], [("model.rate", "is changed before backward()")],
    ),
    "a rate set behind the forward": (
        [(BACKWARD, "        optimizer.param_groups[0]['lr'] = 1\n" + BACKWARD)], [("param_groups", "learning rate")],
    ),
    "a tensor of the batch behind backward": ([(STEP, STEP + "        tell(x)\n")], [("tell(x)", "x is one shard's")]),
    "the last loss is no problem, the last output is": (
        [(LOSS, "        out = model(x)\n        loss = cost(out, y)\n"), (END, "    tell(out.mean())\n")],
        [("out.mean()", "out is one shard's")],
    ),
    "a forward behind backward": (
        [(STEP, STEP + "        a = accuracy(model(x), y).item()\n")], [("accuracy", "worked out behind backward()")],
    ),
    "an all_reduce of a mean of means": (
        [(STEP, STEP + "        t = loss.detach().exp()\n        dist.all_reduce(t)\n")], [("all_reduce", "is no sum")],
    ),
    "a maximum over the ranks": (
        [(STEP, STEP + "        dist.all_reduce(loss, op=dist.ReduceOp.MAX)\n")],
        [("ReduceOp.MAX", "only sums and averages")],
    ),
    "a collective before backward": (
        [(BACKWARD, "        dist.all_reduce(loss)\n" + BACKWARD)], [("all_reduce", "is called before backward()")],
    ),
    "a collective before backward, in a function": (
        [(START, "def mean(t):\n    dist.all_reduce(t)\n    return t / 4\n" + START),
         (LOSS, LOSS + "        part = mean(x)\n")],
        [("all_reduce", "a collective before backward()")],
    ),
    "a barrier": ([(END, "    dist.barrier()\n")], [("dist.barrier()", "torch.distributed.barrier is not known")]),
    "a broadcast": ([(START, START + "dist.broadcast(t, 0)\n")], [("broadcast", "is not known")]),
    "a gather": ([(END, "    dist.all_gather(a, b)\n")], [("all_gather", "is not known")]),
    "no wrapper": ([("model = DDP(model)\n", "")], [("init_process_group", "no DistributedDataParallel")]),
    "no sampler": (
        [("sampler = DistributedSampler(data)\n", ""), (", sampler=sampler", ""),
         ("    sampler.set_epoch(epoch)\n", "")],
        [("DataLoader(data", "has no DistributedSampler")],
    ),
    "another sampler": (
        [("sampler = DistributedSampler(data)\n", "sampler = Mine(data)\n")],
        [("sampler=sampler", "not known to be a Distr")],
    ),
    "the sampler's length": ([(END, "    tell(len(sampler))\n")], [("len(sampler)", "used for something else")]),
    "the loader's batch size": (
        [(END, "    tell(loader.batch_size)\n")],
        [("loader.batch_size", "has no .batch_size")],
    ),
    "a sampler for the evaluation": (
        [(LOADER, LOADER + "valid = DataLoader(d, sampler=DistributedSampler(d))\n")],
        [("valid", "a second DistributedSampler")],
    ),
    "batch_sampler": (
        [(LOADER, "loader = DataLoader(data, batch_sampler=b, sampler=sampler)\n")],
        [("batch_sampler", "the job decides")],
    ),
    "worker_init_fn": ([("batch_size=8,", "worker_init_fn=f,")], [("worker_init_fn", "the job decides")]),
    "arguments that are not seen": ([("batch_size=8,", "**kw,")], [("**kw", "are not seen here")]),
    "a seed for each rank": (
        [(START, START + "torch.manual_seed(dist.get_rank())\n")],
        [("manual_seed", "depends on the rank")],
    ),
    "the rank in an attribute": (
        [(START, START + "args.rank = dist.get_rank()\n")], [("args.rank", "depends on the rank")],
    ),
    "the rank as a device": (
        [(MODEL, "model = make_model().to(dist.get_rank())\n")], [(".to(", "depends on the rank")],
    ),
    "the step in a with of the batch": (
        [(LOSS + BACKWARD + STEP, "        with anomalies():\n    " + LOSS + "    " + BACKWARD + "    " + STEP)],
        [("optimizer.step()", "in the same `with` as backward()")],
    ),
    "what is deleted behind backward": ([(STEP, STEP + "        del x, loss\n")], [("del x", "x is one shard's")]),
    "a function that makes both loaders": (
        [(LOADER, "def make(d, s):\n    return DataLoader(d, sampler=s)\n"
                  "loader, valid = make(data, sampler), make(valid, None)\n")],
        [("return DataLoader", "makes other loaders too")],
    ),
    "DataParallel": (
        [(MODEL, MODEL + "model = torch.nn.DataParallel(model)\n")], [("DataParallel(", "spreads a batch")],
    ),
    "a name for elastic": ([(END, END + "elastic = 1\n")], [("import os", "something called elastic")]),
    "a function that reads a batch's names": (
        [(START, "def f():\n    print(loss)\n" + START)], [("print(loss)", "read in a function")],
    ),
    "a writer of the leader": (
        [(START, START + "w = make() if dist.get_rank() == 0 else None\n"), (END, "    tell(w)\n")],
        [("w = make()", "who leads")],
    ),
    "a writer made under a condition": (
        [(START, START + "if dist.get_rank() == 0:\n    w = make()\n"), (END, "    tell(w)\n")],
        [("if dist.get_rank()", "w is made by the leader alone")],
    ),
    "a best value of the leader": (
        [(EPOCHS, "best = 0\n" + EPOCHS), (END, "    if dist.get_rank() == 0:\n        best = max(best, ask())\n")],
        [("if dist.get_rank()", "best is made by the leader alone")],
    ),
    "ranks that leave": ([(END, "    if dist.get_rank() != 0:\n        continue\n")],
                         [("continue", "only some workers leave"), ("continue", "in its middle")]),
    "RANK in os.environ": (
        [(START, 'if "RANK" in os.environ:\n    pass\n' + START)],
        [('"RANK"', "RANK is read in a way")],
    ),
    "the group under a condition": ([(START, "if big:\n    " + START)], [("init_process_group", "under a condition")]),
    "several statements on a line": (
        [(BACKWARD + STEP, "        loss.backward(); optimizer.step()\n")],
        [("for x, y", "on lines of its own")],
    ),
    "a meter": (
        [(MODEL, "class Meter:\n    pass\nmeter = Meter()\n" + MODEL),
         (STEP, STEP + "        meter.tell(loss.item())\n")],
        [("meter = Meter()", "meter changes from step to step")],
    ),
    "a set": (
        [(EPOCHS, "s = set()\n" + EPOCHS), (STEP, STEP + "        s.add(1)\n")],
        [("s = set()", "s changes from step to step")],
    ),
    "a sum of times": (
        [(EPOCHS, "import time\nt = 0\n" + EPOCHS), (STEP, STEP + "        t += time.time()\n")],
        [("t = 0", "made of times")],
    ),
    "a global": ([(START, "def f():\n    global n\n    n = 1\n" + START)], [("global n", "changes n of another")]),
    "a trainer's package": (
        [("import os\n", "import os\nfrom accelerate import Accelerator\n")],
        [("import os", "accelerate")],
    ),
    "import *": ([("import os\n", "import os\nfrom torch.nn import *\n")], [("import *", "hides")]),
    "a name that means two things": ([(END, "    dist = tell(epoch)\n")], [("dist = tell", "is also the name of")]),
    "mp.spawn": (
        [("import os\n", "import os\nimport torch.multiprocessing as mp\n"), (START, START + "mp.spawn(f)\n")],
        [("mp.spawn", "starts its ranks itself")],
    ),
    "SyncBatchNorm": (
        [(MODEL, MODEL + "model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)\n")],
        [("convert_sync", "SyncBatchNorm")],
    ),
    "the scheduler before the batches": (
        [(HEADER, "    scheduler.step()\n" + HEADER)],
        [("scheduler.step()", "before the batches")],
    ),
    "an optimizer without a name": (
        [(STEP, STEP + "        both[0].step()\n")],
        [("both[0]", "has no name of its own")],
    ),
}
# fmt: on


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    pairs, expected = REFUSED[name]
    refuses(changed(*pairs), expected)


def refuses(script: str, expected: list[tuple[str, str]]) -> None:
    """Exactly these: (part of the line, part of the reason)."""
    found = adopt(script, 4)
    assert found.text == script
    lines = script.splitlines()
    said = [(lines[one.line - 1], one.reason) for one in found.refusals]
    assert len(said) == len(expected), said
    for part, reason in expected:
        assert any(part in line and reason in why for line, why in said), said
    assert all(one.write for one in found.refusals)


# --------------------------------------------------------------------------------------------------- several functions

FUNCTIONS = """\
import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler


def setup():
    dist.init_process_group("gloo")


def cleanup():
    dist.destroy_process_group()


def train(net, batches, optim, rank, epoch):
    total = 0.0
    for i, (x, y) in enumerate(batches):
        optim.zero_grad()
        loss = cost(net(x), y)
        loss.backward()
        optim.step()
        total += loss.item()
        if rank == 0:
            print(epoch, i, total)
    return total


def main(args):
    setup()
    torch.manual_seed(1)
    rank = dist.get_rank()
    data = make()
    model = DDP(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        train(model, loader, optimizer, rank, epoch)
    cleanup()


if __name__ == "__main__":
    main(parse())
"""

ADOPTED_FUNCTIONS = """\
import os
import elastic
import torch


def setup():
    global job
    job = elastic.join(seed=0)


def cleanup():
    pass


def train(net, batches, optim, rank, epoch):
    job.state.total = 0.0
    for step in job.steps(batches):
        optim.zero_grad()
        for x, y in step:
            loss = cost(net(x), y)
            loss.backward()
            step.log(loss=loss)
        i = step.index % len(batches)
        optim.step()
        job.state.total += step.metrics["loss"]
        if job.is_leader:
            print(epoch, i, job.state.total)
    return job.state.total


def main(args):
    setup()
    torch.manual_seed(1)
    rank = job.rank
    data = make()
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = job.loader(data, batch_size=8 * 4, shards=4, shuffle=True, tail="pad")
    job.register(model=model, optimizer=optimizer)
    for epoch in job.epochs(args.epochs):
        train(model, loader, optimizer, rank, epoch)
    cleanup()


if __name__ == "__main__":
    main(parse())
"""
CALL = "        train(model, loader, optimizer, rank, epoch)\n"
TOP = "import os\n"
MAIN = "def main(args):\n    setup()\n"
SEED = "    torch.manual_seed(1)\n"
COUNT = "        total += loss.item()\n"


def test_functions_are_adopted_line_by_line() -> None:
    assert taken(FUNCTIONS) == ADOPTED_FUNCTIONS


# fmt: off
REFUSED_FUNCTIONS: Cases = {
    "a second call": ([(CALL, CALL + CALL)], [("train(model", "called a second time")]),
    "a call from further away": (
        [(CALL, "        go(model, loader, optimizer, rank, epoch)\n"),
         (MAIN, "def go(a, b, c, d, e):\n    train(a, b, c, d, e)\n\n\n" + MAIN)],
        [("for epoch in range", "too far from the batches")],
    ),
    "a method": (
        [("def train(net,", "class Trainer:\n  def train(net,")], [("for i, (x, y)", "in a class, class Trainer")],
    ),
    "the step in a function": (
        [("        optim.zero_grad()\n        loss = cost(net(x), y)\n        loss.backward()\n        optim.step()\n",
          "        loss = go(net, optim, x, y)\n"),
         (MAIN, "def go(net, optim, x, y):\n    loss = cost(net(x), y)\n    loss.backward()\n\n\n" + MAIN)],
        [("loss.backward()", "backward() is in go(), and the loop over the batches is not")],
    ),
    "a list that the caller has made": (
        [("rank, epoch):\n    total = 0.0\n", "rank, epoch, seen):\n    total = 0.0\n"),
         (COUNT, COUNT + "        seen.append(1)\n"), (CALL, CALL.replace("epoch)", "epoch, [])"))],
        [("seen.append", "seen changes from step to step")],
    ),
    "two values of one name": (
        [(CALL, "        total += 1\n" + CALL), ("    sampler = Dist", "    total = 0\n    sampler = Dist")],
        [("total = 0.0", "total is another one")],
    ),
    "a rank that is read at once": (
        [(TOP, TOP + 'RANK = int(os.environ["RANK"])\n')], [("RANK = ", "before elastic.join() does")],
    ),
    "a seed before the group": (
        [(SEED, ""), (MAIN, MAIN.replace("setup()\n", "seed()\n    setup()\n")),
         (TOP, TOP + "def seed():\n    torch.manual_seed(3)\n")],
        [("seed()", "before elastic.join() does")],
    ),
    "a sampler that is passed on": (
        [(CALL, CALL.replace("rank", "sampler"))],
        [("train(model, loader, optimizer, sampler", "used for something else")],
    ),
    "a scheduler's step before the batches": (
        [("    total = 0.0\n", "    total = 0.0\n    plan.step()\n")],
        [("plan.step()", "before the batches of an epoch")],
    ),
    "ranks that the script starts": (
        [("    main(parse())\n", "    torch.multiprocessing.spawn(main, args=(parse(),), nprocs=2)\n")],
        [("spawn(main", "starts its ranks itself")],
    ),
    "@record": (
        [(MAIN, "from torch.distributed.elastic.multiprocessing.errors import record\n\n\n@record\n" + MAIN)],
        [("@record", "errors.record is not known")],
    ),
    "the group ended in finally": (
        [("    cleanup()\n", "    try:\n        tell(1)\n    finally:\n        dist.destroy_process_group()\n")],
        [("destroy", "nothing would be left of this block")],
    ),
    "the dataset of the loader, where it has no name": (
        [(COUNT, COUNT + "        tell(len(batches.dataset))\n")], [("batches.dataset", "job.loader has no .dataset")],
    ),
}
# fmt: on


@pytest.mark.parametrize("name", REFUSED_FUNCTIONS)
def test_functions_refused(name: str) -> None:
    pairs, expected = REFUSED_FUNCTIONS[name]
    refuses(changed(*pairs, script=FUNCTIONS), expected)


def test_the_mean_of_a_function_is_that_of_its_argument() -> None:
    mean = "def mean(t):\n    t = t.clone()\n    dist.all_reduce(t)\n    return t / dist.get_world_size()\n\n\n"
    script = changed((MAIN, mean + MAIN), (COUNT, "        total += mean(loss).item()\n"), script=FUNCTIONS)
    found = taken(script)
    shows(found, "    t = t.clone()\n    t *= 4\n    return t / 4\n")
    shows(found, '        loss = torch.tensor(step.metrics["loss"])\n')
    refuses(script.replace("mean(loss)", "mean(loss.exp())"), [("all_reduce", "t is no sum of what the ranks had")])


def test_the_loops_may_be_in_a_function_that_is_given_all() -> None:
    loops = FUNCTIONS[FUNCTIONS.index("    for epoch") : FUNCTIONS.index("    cleanup()\n")]
    fit = "def fit(args, model, loader, optimizer, rank):\n" + loops.replace("sampler", "loader.sampler") + "\n\n"
    script = changed((loops, "    fit(args, model, loader, optimizer, rank)\n"), (MAIN, fit + MAIN), script=FUNCTIONS)
    shows(
        taken(script),
        """\
        def fit(args, model, loader, optimizer, rank):
            job.register(model=model, optimizer=optimizer)
            for epoch in job.epochs(args.epochs):
                train(model, loader, optimizer, rank, epoch)
        """,
    )


# -------------------------------------------------------------------------------------------------- one process


def test_a_script_of_one_process() -> None:
    assert taken(PLAIN) == ADOPTED_PLAIN


def test_a_sum_by_the_size_of_the_shard_is_a_mean() -> None:
    taken(changed(("cost(model(x), y)", "(model(x) - y).square().sum() / len(y)"), script=PLAIN))


def test_loops_under_the_name_of_the_script_have_their_job_where_the_loader_is() -> None:
    def guarded(script: str, first: str) -> str:
        head, begin, rest = script.partition(first)
        return f'{head}if __name__ == "__main__":\n' + textwrap.indent(begin + rest, "    ")

    assert taken(guarded(PLAIN, "for epoch")) == guarded(ADOPTED_PLAIN, "job.register")


# fmt: off
REFUSED_PLAIN: Cases = {
    "a sum by the criterion": (
        [("lr=0.1)\n", "lr=0.1)\ncriterion = torch.nn.MSELoss(reduction='sum')\n"), ("cost(model", "criterion(model")],
        [("criterion(model", "is a sum over the samples")],
    ),
    "a sum": (
        [("cost(model(x), y)", "(model(x) - y).square().sum()")], [(".sum()", "is a sum over the samples")],
    ),
    "a sum by the size of the batch": (
        [("cost(model(x), y)", "(model(x) - y).square().sum() / 8")], [(".sum() / 8", "is a sum over the samples")],
    ),
    "a sum that a function returns": (
        [("import DataLoader\n", "import DataLoader\n\n\ndef square(out, y):\n    return ((out - y) ** 2).sum()\n"),
         ("cost(model", "square(model")],
        [("square(model", "is a sum over the samples")],
    ),
    "a sum in a function": (
        [("import DataLoader\n", "import DataLoader\nimport torch.nn.functional as F\n\n\ndef both(out, y):\n"
          "    near = F.mse_loss(out, y, reduction='sum')\n    return near + out.abs().mean()\n"),
         ("cost(model", "both(model")],
        [("near =", "is a sum over the samples")],
    ),
    "a count": ([("print(epoch, loss.item())", "print(len(x))")], [("len(x)", "the mean or the sum is not known")]),
}
# fmt: on


@pytest.mark.parametrize("name", REFUSED_PLAIN)
def test_a_script_of_one_process_refused(name: str) -> None:
    pairs, expected = REFUSED_PLAIN[name]
    refuses(changed(*pairs, script=PLAIN), expected)


# -------------------------------------------------------------------------------------------------------- the text


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("\n", "\r\n"),
        ("    ", "\t"),
        ("    ", "  "),
        ("cost(", "größe('äöü→𝄞', "),
        ("tell(", 'tell("\f\u2028", '),
    ],
)
def test_the_rest_of_the_text_stays(old: str, new: str) -> None:
    assert taken(SCRIPT.replace(old, new)) == ADOPTED.replace(old, new)


def test_a_script_may_end_without_a_newline() -> None:
    end = "\n    tell(epoch)"
    assert taken(SCRIPT[: SCRIPT.index(end)]) == ADOPTED[: ADOPTED.index(end)]
    missing = "\\ No newline at end of file"
    assert diff("a", "x\ny", "x\nz").splitlines()[-4:] == ["-y", missing, "+z", missing]


@pytest.mark.parametrize("script", [SCRIPT, FUNCTIONS, PLAIN], ids=["script", "functions", "plain"])
def test_no_line_that_is_missing_or_twice_is_a_surprise(script: str) -> None:
    """Whatever is left of the script is adopted, and is Python then, or refused."""
    lines = script.splitlines(keepends=True)
    every = [lines[:n] + again + lines[n + 1 :] for n, line in enumerate(lines) for again in ([], [line, line])]
    outcomes = set()
    for text in map("".join, every):
        try:
            ast.parse(text)
        except SyntaxError:
            continue
        found = adopt(text, 4)
        ast.parse(found.text)
        assert not any("no Python" in refusal.reason for refusal in found.refusals), text
        outcomes.add(bool(found.refusals))
    assert outcomes == {True, False}


def test_what_is_no_python_is_no_script() -> None:
    with pytest.raises(SyntaxError):
        adopt("for x in", 4)
