"""The agent of a node: `python -m elastic.agent` runs one job's workers there and attends the job's leader.

process/           processes of workers: how they are started, watched, ended
worker/            the worker's end of its connection to the agent; `runtime` imports it
agent.py           the agent itself: passes on what workers and the leader say
leader_session.py  the stream to the job's leader: words and beats up, orders down
workers.py         slots, processes, words and beats of all workers of the node
worker_socket.py   the unix socket on which workers speak to the agent
context.py         which job on which node, for all parts of the agent
rare_beats.py      which words wait for the next beat, in a large job
standing_words.py  what each new leader has to hear about the workers
ledger_writer.py   records of applied steps, on their way into the ledger
drain.py           how the node leaves the job when it has a notice
slot_file.py       which incarnations the slots have had
options.py         the command line of the agent
__main__.py        `python -m elastic.agent`
"""
