from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class AgentWord(_message.Message):
    __slots__ = ("hello", "beat", "word", "goodbye")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    BEAT_FIELD_NUMBER: _ClassVar[int]
    WORD_FIELD_NUMBER: _ClassVar[int]
    GOODBYE_FIELD_NUMBER: _ClassVar[int]
    hello: AgentHello
    beat: Beat
    word: Word
    goodbye: Goodbye
    def __init__(self, hello: _Optional[_Union[AgentHello, _Mapping]] = ..., beat: _Optional[_Union[Beat, _Mapping]] = ..., word: _Optional[_Union[Word, _Mapping]] = ..., goodbye: _Optional[_Union[Goodbye, _Mapping]] = ...) -> None: ...

class AgentHello(_message.Message):
    __slots__ = ("job", "node", "slots", "known", "token", "term")
    JOB_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    job: str
    node: str
    slots: int
    known: _containers.RepeatedCompositeFieldContainer[Known]
    token: str
    term: int
    def __init__(self, job: _Optional[str] = ..., node: _Optional[str] = ..., slots: _Optional[int] = ..., known: _Optional[_Iterable[_Union[Known, _Mapping]]] = ..., token: _Optional[str] = ..., term: _Optional[int] = ...) -> None: ...

class Known(_message.Message):
    __slots__ = ("number", "digest")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    number: int
    digest: str
    def __init__(self, number: _Optional[int] = ..., digest: _Optional[str] = ...) -> None: ...

class LeaderOrder(_message.Message):
    __slots__ = ("welcome", "beat", "addressed", "end", "drain_node", "worker_signal")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    BEAT_FIELD_NUMBER: _ClassVar[int]
    ADDRESSED_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    DRAIN_NODE_FIELD_NUMBER: _ClassVar[int]
    WORKER_SIGNAL_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    beat: Beat
    addressed: Addressed
    end: End
    drain_node: DrainNode
    worker_signal: WorkerSignal
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., beat: _Optional[_Union[Beat, _Mapping]] = ..., addressed: _Optional[_Union[Addressed, _Mapping]] = ..., end: _Optional[_Union[End, _Mapping]] = ..., drain_node: _Optional[_Union[DrainNode, _Mapping]] = ..., worker_signal: _Optional[_Union[WorkerSignal, _Mapping]] = ...) -> None: ...

class DrainNode(_message.Message):
    __slots__ = ("left_ms", "because", "over")
    LEFT_MS_FIELD_NUMBER: _ClassVar[int]
    BECAUSE_FIELD_NUMBER: _ClassVar[int]
    OVER_FIELD_NUMBER: _ClassVar[int]
    left_ms: int
    because: str
    over: bool
    def __init__(self, left_ms: _Optional[int] = ..., because: _Optional[str] = ..., over: bool = ...) -> None: ...

class WorkerSignal(_message.Message):
    __slots__ = ("worker_id", "kind")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        KIND_UNKNOWN: _ClassVar[WorkerSignal.Kind]
        STACKS: _ClassVar[WorkerSignal.Kind]
        KILL: _ClassVar[WorkerSignal.Kind]
    KIND_UNKNOWN: WorkerSignal.Kind
    STACKS: WorkerSignal.Kind
    KILL: WorkerSignal.Kind
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    kind: WorkerSignal.Kind
    def __init__(self, worker_id: _Optional[str] = ..., kind: _Optional[_Union[WorkerSignal.Kind, str]] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("term", "beat_ms", "infers_rings")
    TERM_FIELD_NUMBER: _ClassVar[int]
    BEAT_MS_FIELD_NUMBER: _ClassVar[int]
    INFERS_RINGS_FIELD_NUMBER: _ClassVar[int]
    term: int
    beat_ms: int
    infers_rings: bool
    def __init__(self, term: _Optional[int] = ..., beat_ms: _Optional[int] = ..., infers_rings: bool = ...) -> None: ...

class Addressed(_message.Message):
    __slots__ = ("to", "order", "packed", "delta", "shares", "laggards")
    TO_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    PACKED_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    SHARES_FIELD_NUMBER: _ClassVar[int]
    LAGGARDS_FIELD_NUMBER: _ClassVar[int]
    to: _containers.RepeatedScalarFieldContainer[str]
    order: bytes
    packed: bytes
    delta: bytes
    shares: _containers.RepeatedCompositeFieldContainer[Share]
    laggards: _containers.RepeatedCompositeFieldContainer[Laggard]
    def __init__(self, to: _Optional[_Iterable[str]] = ..., order: _Optional[bytes] = ..., packed: _Optional[bytes] = ..., delta: _Optional[bytes] = ..., shares: _Optional[_Iterable[_Union[Share, _Mapping]]] = ..., laggards: _Optional[_Iterable[_Union[Laggard, _Mapping]]] = ...) -> None: ...

class Delta(_message.Message):
    __slots__ = ("term", "base_number", "base_digest", "digest", "head", "gone", "placed", "same_paces")
    TERM_FIELD_NUMBER: _ClassVar[int]
    BASE_NUMBER_FIELD_NUMBER: _ClassVar[int]
    BASE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    HEAD_FIELD_NUMBER: _ClassVar[int]
    GONE_FIELD_NUMBER: _ClassVar[int]
    PLACED_FIELD_NUMBER: _ClassVar[int]
    SAME_PACES_FIELD_NUMBER: _ClassVar[int]
    term: int
    base_number: int
    base_digest: str
    digest: str
    head: Generation
    gone: _containers.RepeatedScalarFieldContainer[int]
    placed: _containers.RepeatedCompositeFieldContainer[Placed]
    same_paces: bool
    def __init__(self, term: _Optional[int] = ..., base_number: _Optional[int] = ..., base_digest: _Optional[str] = ..., digest: _Optional[str] = ..., head: _Optional[_Union[Generation, _Mapping]] = ..., gone: _Optional[_Iterable[int]] = ..., placed: _Optional[_Iterable[_Union[Placed, _Mapping]]] = ..., same_paces: bool = ...) -> None: ...

class Placed(_message.Message):
    __slots__ = ("rank", "member")
    RANK_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    rank: int
    member: Member
    def __init__(self, rank: _Optional[int] = ..., member: _Optional[_Union[Member, _Mapping]] = ...) -> None: ...

class End(_message.Message):
    __slots__ = ("term", "exit_code", "because", "digest")
    TERM_FIELD_NUMBER: _ClassVar[int]
    EXIT_CODE_FIELD_NUMBER: _ClassVar[int]
    BECAUSE_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    term: int
    exit_code: int
    because: str
    digest: str
    def __init__(self, term: _Optional[int] = ..., exit_code: _Optional[int] = ..., because: _Optional[str] = ..., digest: _Optional[str] = ...) -> None: ...

class WorkerWord(_message.Message):
    __slots__ = ("hello", "word", "record", "goodbye")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    WORD_FIELD_NUMBER: _ClassVar[int]
    RECORD_FIELD_NUMBER: _ClassVar[int]
    GOODBYE_FIELD_NUMBER: _ClassVar[int]
    hello: WorkerHello
    word: Word
    record: StepRecord
    goodbye: Goodbye
    def __init__(self, hello: _Optional[_Union[WorkerHello, _Mapping]] = ..., word: _Optional[_Union[Word, _Mapping]] = ..., record: _Optional[_Union[StepRecord, _Mapping]] = ..., goodbye: _Optional[_Union[Goodbye, _Mapping]] = ...) -> None: ...

class WorkerHello(_message.Message):
    __slots__ = ("job", "worker_id", "pid")
    JOB_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    job: str
    worker_id: str
    pid: int
    def __init__(self, job: _Optional[str] = ..., worker_id: _Optional[str] = ..., pid: _Optional[int] = ...) -> None: ...

class AgentOrder(_message.Message):
    __slots__ = ("order", "kept")
    ORDER_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    order: Order
    kept: RecordsKept
    def __init__(self, order: _Optional[_Union[Order, _Mapping]] = ..., kept: _Optional[_Union[RecordsKept, _Mapping]] = ...) -> None: ...

class StepRecord(_message.Message):
    __slots__ = ("number", "line")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    LINE_FIELD_NUMBER: _ClassVar[int]
    number: int
    line: str
    def __init__(self, number: _Optional[int] = ..., line: _Optional[str] = ...) -> None: ...

class RecordsKept(_message.Message):
    __slots__ = ("up_to",)
    UP_TO_FIELD_NUMBER: _ClassVar[int]
    up_to: int
    def __init__(self, up_to: _Optional[int] = ...) -> None: ...

class Beat(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Goodbye(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ("job",)
    JOB_FIELD_NUMBER: _ClassVar[int]
    job: str
    def __init__(self, job: _Optional[str] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("node", "drain_node", "job")
    NODE_FIELD_NUMBER: _ClassVar[int]
    DRAIN_NODE_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    node: str
    drain_node: DrainNode
    job: str
    def __init__(self, node: _Optional[str] = ..., drain_node: _Optional[_Union[DrainNode, _Mapping]] = ..., job: _Optional[str] = ...) -> None: ...

class DrainReply(_message.Message):
    __slots__ = ("leading", "leader", "nodes")
    LEADING_FIELD_NUMBER: _ClassVar[int]
    LEADER_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    leading: bool
    leader: str
    nodes: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, leading: bool = ..., leader: _Optional[str] = ..., nodes: _Optional[_Iterable[str]] = ...) -> None: ...

class SignalWorkerRequest(_message.Message):
    __slots__ = ("job", "signal")
    JOB_FIELD_NUMBER: _ClassVar[int]
    SIGNAL_FIELD_NUMBER: _ClassVar[int]
    job: str
    signal: WorkerSignal
    def __init__(self, job: _Optional[str] = ..., signal: _Optional[_Union[WorkerSignal, _Mapping]] = ...) -> None: ...

class SignalWorkerReply(_message.Message):
    __slots__ = ("leading", "leader", "workers")
    LEADING_FIELD_NUMBER: _ClassVar[int]
    LEADER_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    leading: bool
    leader: str
    workers: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, leading: bool = ..., leader: _Optional[str] = ..., workers: _Optional[_Iterable[str]] = ...) -> None: ...

class StatusReply(_message.Message):
    __slots__ = ("leading", "leader", "document")
    LEADING_FIELD_NUMBER: _ClassVar[int]
    LEADER_FIELD_NUMBER: _ClassVar[int]
    DOCUMENT_FIELD_NUMBER: _ClassVar[int]
    leading: bool
    leader: str
    document: str
    def __init__(self, leading: bool = ..., leader: _Optional[str] = ..., document: _Optional[str] = ...) -> None: ...

class NodeWord(_message.Message):
    __slots__ = ("hello", "troubles", "piece", "goodbye", "leaves", "examined")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    TROUBLES_FIELD_NUMBER: _ClassVar[int]
    PIECE_FIELD_NUMBER: _ClassVar[int]
    GOODBYE_FIELD_NUMBER: _ClassVar[int]
    LEAVES_FIELD_NUMBER: _ClassVar[int]
    EXAMINED_FIELD_NUMBER: _ClassVar[int]
    hello: NodeHello
    troubles: NodeTroubles
    piece: LogPiece
    goodbye: Goodbye
    leaves: NodeLeaves
    examined: Examined
    def __init__(self, hello: _Optional[_Union[NodeHello, _Mapping]] = ..., troubles: _Optional[_Union[NodeTroubles, _Mapping]] = ..., piece: _Optional[_Union[LogPiece, _Mapping]] = ..., goodbye: _Optional[_Union[Goodbye, _Mapping]] = ..., leaves: _Optional[_Union[NodeLeaves, _Mapping]] = ..., examined: _Optional[_Union[Examined, _Mapping]] = ...) -> None: ...

class NodeHello(_message.Message):
    __slots__ = ("node", "slots", "labels", "address", "lock", "leave_ms", "term")
    NODE_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    LOCK_FIELD_NUMBER: _ClassVar[int]
    LEAVE_MS_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    node: str
    slots: int
    labels: _containers.RepeatedScalarFieldContainer[str]
    address: str
    lock: str
    leave_ms: int
    term: int
    def __init__(self, node: _Optional[str] = ..., slots: _Optional[int] = ..., labels: _Optional[_Iterable[str]] = ..., address: _Optional[str] = ..., lock: _Optional[str] = ..., leave_ms: _Optional[int] = ..., term: _Optional[int] = ...) -> None: ...

class NodeLeaves(_message.Message):
    __slots__ = ("because", "notice")
    BECAUSE_FIELD_NUMBER: _ClassVar[int]
    NOTICE_FIELD_NUMBER: _ClassVar[int]
    because: str
    notice: bool
    def __init__(self, because: _Optional[str] = ..., notice: bool = ...) -> None: ...

class NodeTroubles(_message.Message):
    __slots__ = ("troubles", "holds")
    TROUBLES_FIELD_NUMBER: _ClassVar[int]
    HOLDS_FIELD_NUMBER: _ClassVar[int]
    troubles: _containers.RepeatedCompositeFieldContainer[Trouble]
    holds: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, troubles: _Optional[_Iterable[_Union[Trouble, _Mapping]]] = ..., holds: _Optional[_Iterable[str]] = ...) -> None: ...

class Trouble(_message.Message):
    __slots__ = ("job", "because")
    JOB_FIELD_NUMBER: _ClassVar[int]
    BECAUSE_FIELD_NUMBER: _ClassVar[int]
    job: str
    because: str
    def __init__(self, job: _Optional[str] = ..., because: _Optional[str] = ...) -> None: ...

class NodeOrder(_message.Message):
    __slots__ = ("welcome", "duties", "log", "examine", "end")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    DUTIES_FIELD_NUMBER: _ClassVar[int]
    LOG_FIELD_NUMBER: _ClassVar[int]
    EXAMINE_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    duties: Duties
    log: LogQuery
    examine: ExamineNode
    end: EndAgent
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., duties: _Optional[_Union[Duties, _Mapping]] = ..., log: _Optional[_Union[LogQuery, _Mapping]] = ..., examine: _Optional[_Union[ExamineNode, _Mapping]] = ..., end: _Optional[_Union[EndAgent, _Mapping]] = ...) -> None: ...

class Duties(_message.Message):
    __slots__ = ("term", "duties", "over", "keeps")
    TERM_FIELD_NUMBER: _ClassVar[int]
    DUTIES_FIELD_NUMBER: _ClassVar[int]
    OVER_FIELD_NUMBER: _ClassVar[int]
    KEEPS_FIELD_NUMBER: _ClassVar[int]
    term: int
    duties: _containers.RepeatedCompositeFieldContainer[Duty]
    over: _containers.RepeatedCompositeFieldContainer[Over]
    keeps: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, term: _Optional[int] = ..., duties: _Optional[_Iterable[_Union[Duty, _Mapping]]] = ..., over: _Optional[_Iterable[_Union[Over, _Mapping]]] = ..., keeps: _Optional[_Iterable[str]] = ...) -> None: ...

class Over(_message.Message):
    __slots__ = ("job", "result")
    JOB_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    job: str
    result: str
    def __init__(self, job: _Optional[str] = ..., result: _Optional[str] = ...) -> None: ...

class Duty(_message.Message):
    __slots__ = ("job", "slots", "leave", "document", "token")
    JOB_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    LEAVE_FIELD_NUMBER: _ClassVar[int]
    DOCUMENT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    job: str
    slots: int
    leave: bool
    document: str
    token: str
    def __init__(self, job: _Optional[str] = ..., slots: _Optional[int] = ..., leave: bool = ..., document: _Optional[str] = ..., token: _Optional[str] = ...) -> None: ...

class ExamineNode(_message.Message):
    __slots__ = ("number", "open", "reach")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    REACH_FIELD_NUMBER: _ClassVar[int]
    number: int
    open: bool
    reach: _containers.RepeatedCompositeFieldContainer[OpenPort]
    def __init__(self, number: _Optional[int] = ..., open: bool = ..., reach: _Optional[_Iterable[_Union[OpenPort, _Mapping]]] = ...) -> None: ...

class OpenPort(_message.Message):
    __slots__ = ("node", "host", "port")
    NODE_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    node: str
    host: str
    port: int
    def __init__(self, node: _Optional[str] = ..., host: _Optional[str] = ..., port: _Optional[int] = ...) -> None: ...

class Examined(_message.Message):
    __slots__ = ("number", "document")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    DOCUMENT_FIELD_NUMBER: _ClassVar[int]
    number: int
    document: str
    def __init__(self, number: _Optional[int] = ..., document: _Optional[str] = ...) -> None: ...

class LogQuery(_message.Message):
    __slots__ = ("number", "job", "log", "offset")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    LOG_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    number: int
    job: str
    log: str
    offset: int
    def __init__(self, number: _Optional[int] = ..., job: _Optional[str] = ..., log: _Optional[str] = ..., offset: _Optional[int] = ...) -> None: ...

class LogPiece(_message.Message):
    __slots__ = ("number", "text", "end", "size")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    number: int
    text: bytes
    end: int
    size: int
    def __init__(self, number: _Optional[int] = ..., text: _Optional[bytes] = ..., end: _Optional[int] = ..., size: _Optional[int] = ...) -> None: ...

class Question(_message.Message):
    __slots__ = ("submit", "stop", "cordon", "overview", "log", "examine", "scale", "ports", "allow", "end_agent")
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    CORDON_FIELD_NUMBER: _ClassVar[int]
    OVERVIEW_FIELD_NUMBER: _ClassVar[int]
    LOG_FIELD_NUMBER: _ClassVar[int]
    EXAMINE_FIELD_NUMBER: _ClassVar[int]
    SCALE_FIELD_NUMBER: _ClassVar[int]
    PORTS_FIELD_NUMBER: _ClassVar[int]
    ALLOW_FIELD_NUMBER: _ClassVar[int]
    END_AGENT_FIELD_NUMBER: _ClassVar[int]
    submit: Submit
    stop: Stop
    cordon: Cordon
    overview: Overview
    log: ReadLog
    examine: Examine
    scale: Scale
    ports: Ports
    allow: Allow
    end_agent: EndAgent
    def __init__(self, submit: _Optional[_Union[Submit, _Mapping]] = ..., stop: _Optional[_Union[Stop, _Mapping]] = ..., cordon: _Optional[_Union[Cordon, _Mapping]] = ..., overview: _Optional[_Union[Overview, _Mapping]] = ..., log: _Optional[_Union[ReadLog, _Mapping]] = ..., examine: _Optional[_Union[Examine, _Mapping]] = ..., scale: _Optional[_Union[Scale, _Mapping]] = ..., ports: _Optional[_Union[Ports, _Mapping]] = ..., allow: _Optional[_Union[Allow, _Mapping]] = ..., end_agent: _Optional[_Union[EndAgent, _Mapping]] = ...) -> None: ...

class Submit(_message.Message):
    __slots__ = ("document", "resume", "token", "identity")
    DOCUMENT_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    document: str
    resume: str
    token: str
    identity: str
    def __init__(self, document: _Optional[str] = ..., resume: _Optional[str] = ..., token: _Optional[str] = ..., identity: _Optional[str] = ...) -> None: ...

class Stop(_message.Message):
    __slots__ = ("job", "because")
    JOB_FIELD_NUMBER: _ClassVar[int]
    BECAUSE_FIELD_NUMBER: _ClassVar[int]
    job: str
    because: str
    def __init__(self, job: _Optional[str] = ..., because: _Optional[str] = ...) -> None: ...

class Scale(_message.Message):
    __slots__ = ("job", "workers")
    JOB_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    job: str
    workers: int
    def __init__(self, job: _Optional[str] = ..., workers: _Optional[int] = ...) -> None: ...

class Allow(_message.Message):
    __slots__ = ("owner", "slots")
    OWNER_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    owner: str
    slots: int
    def __init__(self, owner: _Optional[str] = ..., slots: _Optional[int] = ...) -> None: ...

class Cordon(_message.Message):
    __slots__ = ("node", "because", "over")
    NODE_FIELD_NUMBER: _ClassVar[int]
    BECAUSE_FIELD_NUMBER: _ClassVar[int]
    OVER_FIELD_NUMBER: _ClassVar[int]
    node: str
    because: str
    over: bool
    def __init__(self, node: _Optional[str] = ..., because: _Optional[str] = ..., over: bool = ...) -> None: ...

class EndAgent(_message.Message):
    __slots__ = ("node", "process")
    NODE_FIELD_NUMBER: _ClassVar[int]
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    node: str
    process: str
    def __init__(self, node: _Optional[str] = ..., process: _Optional[str] = ...) -> None: ...

class Overview(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReadLog(_message.Message):
    __slots__ = ("job", "node", "log", "offset", "here")
    JOB_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    LOG_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    HERE_FIELD_NUMBER: _ClassVar[int]
    job: str
    node: str
    log: str
    offset: int
    here: bool
    def __init__(self, job: _Optional[str] = ..., node: _Optional[str] = ..., log: _Optional[str] = ..., offset: _Optional[int] = ..., here: bool = ...) -> None: ...

class Examine(_message.Message):
    __slots__ = ("node",)
    NODE_FIELD_NUMBER: _ClassVar[int]
    node: str
    def __init__(self, node: _Optional[str] = ...) -> None: ...

class Ports(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Answer(_message.Message):
    __slots__ = ("leading", "leader", "refused", "document")
    LEADING_FIELD_NUMBER: _ClassVar[int]
    LEADER_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    DOCUMENT_FIELD_NUMBER: _ClassVar[int]
    leading: bool
    leader: str
    refused: str
    document: str
    def __init__(self, leading: bool = ..., leader: _Optional[str] = ..., refused: _Optional[str] = ..., document: _Optional[str] = ...) -> None: ...

class TreeNode(_message.Message):
    __slots__ = ("lo", "hi")
    LO_FIELD_NUMBER: _ClassVar[int]
    HI_FIELD_NUMBER: _ClassVar[int]
    lo: int
    hi: int
    def __init__(self, lo: _Optional[int] = ..., hi: _Optional[int] = ...) -> None: ...

class Member(_message.Message):
    __slots__ = ("worker_id", "node", "host", "port", "seniority", "home")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    SENIORITY_FIELD_NUMBER: _ClassVar[int]
    HOME_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    node: str
    host: str
    port: int
    seniority: int
    home: int
    def __init__(self, worker_id: _Optional[str] = ..., node: _Optional[str] = ..., host: _Optional[str] = ..., port: _Optional[int] = ..., seniority: _Optional[int] = ..., home: _Optional[int] = ...) -> None: ...

class Share(_message.Message):
    __slots__ = ("worker_id", "keep", "units")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    KEEP_FIELD_NUMBER: _ClassVar[int]
    UNITS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    keep: _containers.RepeatedCompositeFieldContainer[TreeNode]
    units: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, worker_id: _Optional[str] = ..., keep: _Optional[_Iterable[_Union[TreeNode, _Mapping]]] = ..., units: _Optional[_Iterable[int]] = ...) -> None: ...

class Laggard(_message.Message):
    __slots__ = ("worker_id", "source")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    source: str
    def __init__(self, worker_id: _Optional[str] = ..., source: _Optional[str] = ...) -> None: ...

class Plan(_message.Message):
    __slots__ = ("op", "units", "shares", "laggards", "newcomers", "paces", "all_tasks", "slack")
    OP_FIELD_NUMBER: _ClassVar[int]
    UNITS_FIELD_NUMBER: _ClassVar[int]
    SHARES_FIELD_NUMBER: _ClassVar[int]
    LAGGARDS_FIELD_NUMBER: _ClassVar[int]
    NEWCOMERS_FIELD_NUMBER: _ClassVar[int]
    PACES_FIELD_NUMBER: _ClassVar[int]
    ALL_TASKS_FIELD_NUMBER: _ClassVar[int]
    SLACK_FIELD_NUMBER: _ClassVar[int]
    op: int
    units: int
    shares: _containers.RepeatedCompositeFieldContainer[Share]
    laggards: _containers.RepeatedCompositeFieldContainer[Laggard]
    newcomers: _containers.RepeatedScalarFieldContainer[str]
    paces: _containers.RepeatedScalarFieldContainer[int]
    all_tasks: str
    slack: int
    def __init__(self, op: _Optional[int] = ..., units: _Optional[int] = ..., shares: _Optional[_Iterable[_Union[Share, _Mapping]]] = ..., laggards: _Optional[_Iterable[_Union[Laggard, _Mapping]]] = ..., newcomers: _Optional[_Iterable[str]] = ..., paces: _Optional[_Iterable[int]] = ..., all_tasks: _Optional[str] = ..., slack: _Optional[int] = ...) -> None: ...

class Generation(_message.Message):
    __slots__ = ("number", "kind", "base", "members", "plan", "because", "hold", "token", "early", "began")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        KIND_UNKNOWN: _ClassVar[Generation.Kind]
        FORM: _ClassVar[Generation.Kind]
        LOSS: _ClassVar[Generation.Kind]
        PLANNED: _ClassVar[Generation.Kind]
    KIND_UNKNOWN: Generation.Kind
    FORM: Generation.Kind
    LOSS: Generation.Kind
    PLANNED: Generation.Kind
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    BECAUSE_FIELD_NUMBER: _ClassVar[int]
    HOLD_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    EARLY_FIELD_NUMBER: _ClassVar[int]
    BEGAN_FIELD_NUMBER: _ClassVar[int]
    number: int
    kind: Generation.Kind
    base: int
    members: _containers.RepeatedCompositeFieldContainer[Member]
    plan: Plan
    because: str
    hold: bool
    token: str
    early: bool
    began: str
    def __init__(self, number: _Optional[int] = ..., kind: _Optional[_Union[Generation.Kind, str]] = ..., base: _Optional[int] = ..., members: _Optional[_Iterable[_Union[Member, _Mapping]]] = ..., plan: _Optional[_Union[Plan, _Mapping]] = ..., because: _Optional[str] = ..., hold: bool = ..., token: _Optional[str] = ..., early: bool = ..., began: _Optional[str] = ...) -> None: ...

class Word(_message.Message):
    __slots__ = ("announce", "report", "ring_up", "ring_broken", "build_failed", "progress", "ready", "drain_wish", "left", "finished", "failed", "worker_dead", "worker_frozen", "slot_given_up", "drain_over", "checkpoint_complete", "unreadable", "corrupted")
    ANNOUNCE_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    RING_UP_FIELD_NUMBER: _ClassVar[int]
    RING_BROKEN_FIELD_NUMBER: _ClassVar[int]
    BUILD_FAILED_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    DRAIN_WISH_FIELD_NUMBER: _ClassVar[int]
    LEFT_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    WORKER_DEAD_FIELD_NUMBER: _ClassVar[int]
    WORKER_FROZEN_FIELD_NUMBER: _ClassVar[int]
    SLOT_GIVEN_UP_FIELD_NUMBER: _ClassVar[int]
    DRAIN_OVER_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_COMPLETE_FIELD_NUMBER: _ClassVar[int]
    UNREADABLE_FIELD_NUMBER: _ClassVar[int]
    CORRUPTED_FIELD_NUMBER: _ClassVar[int]
    announce: Announce
    report: Report
    ring_up: RingUp
    ring_broken: RingBroken
    build_failed: BuildFailed
    progress: Progress
    ready: Ready
    drain_wish: DrainWish
    left: Left
    finished: Finished
    failed: Failed
    worker_dead: WorkerDead
    worker_frozen: WorkerFrozen
    slot_given_up: SlotGivenUp
    drain_over: DrainOver
    checkpoint_complete: CheckpointComplete
    unreadable: Unreadable
    corrupted: Corrupted
    def __init__(self, announce: _Optional[_Union[Announce, _Mapping]] = ..., report: _Optional[_Union[Report, _Mapping]] = ..., ring_up: _Optional[_Union[RingUp, _Mapping]] = ..., ring_broken: _Optional[_Union[RingBroken, _Mapping]] = ..., build_failed: _Optional[_Union[BuildFailed, _Mapping]] = ..., progress: _Optional[_Union[Progress, _Mapping]] = ..., ready: _Optional[_Union[Ready, _Mapping]] = ..., drain_wish: _Optional[_Union[DrainWish, _Mapping]] = ..., left: _Optional[_Union[Left, _Mapping]] = ..., finished: _Optional[_Union[Finished, _Mapping]] = ..., failed: _Optional[_Union[Failed, _Mapping]] = ..., worker_dead: _Optional[_Union[WorkerDead, _Mapping]] = ..., worker_frozen: _Optional[_Union[WorkerFrozen, _Mapping]] = ..., slot_given_up: _Optional[_Union[SlotGivenUp, _Mapping]] = ..., drain_over: _Optional[_Union[DrainOver, _Mapping]] = ..., checkpoint_complete: _Optional[_Union[CheckpointComplete, _Mapping]] = ..., unreadable: _Optional[_Union[Unreadable, _Mapping]] = ..., corrupted: _Optional[_Union[Corrupted, _Mapping]] = ...) -> None: ...

class Announce(_message.Message):
    __slots__ = ("worker_id", "node", "slot", "pid", "host", "port", "numerics", "entered", "ring", "reduced", "ready", "invited", "snapshot", "home", "device")
    class RingState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        RING_STATE_UNKNOWN: _ClassVar[Announce.RingState]
        NONE: _ClassVar[Announce.RingState]
        BUILDING: _ClassVar[Announce.RingState]
        LIVE: _ClassVar[Announce.RingState]
        ABORTED: _ClassVar[Announce.RingState]
    RING_STATE_UNKNOWN: Announce.RingState
    NONE: Announce.RingState
    BUILDING: Announce.RingState
    LIVE: Announce.RingState
    ABORTED: Announce.RingState
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_FIELD_NUMBER: _ClassVar[int]
    ENTERED_FIELD_NUMBER: _ClassVar[int]
    RING_FIELD_NUMBER: _ClassVar[int]
    REDUCED_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    INVITED_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    HOME_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    node: str
    slot: int
    pid: int
    host: str
    port: int
    numerics: str
    entered: int
    ring: Announce.RingState
    reduced: int
    ready: bool
    invited: bool
    snapshot: str
    home: int
    device: str
    def __init__(self, worker_id: _Optional[str] = ..., node: _Optional[str] = ..., slot: _Optional[int] = ..., pid: _Optional[int] = ..., host: _Optional[str] = ..., port: _Optional[int] = ..., numerics: _Optional[str] = ..., entered: _Optional[int] = ..., ring: _Optional[_Union[Announce.RingState, str]] = ..., reduced: _Optional[int] = ..., ready: bool = ..., invited: bool = ..., snapshot: _Optional[str] = ..., home: _Optional[int] = ..., device: _Optional[str] = ...) -> None: ...

class Report(_message.Message):
    __slots__ = ("worker_id", "round", "promise", "entered", "has_state", "reduced", "units", "roots", "running", "kept", "copied", "copied_step", "began", "closed")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    PROMISE_FIELD_NUMBER: _ClassVar[int]
    ENTERED_FIELD_NUMBER: _ClassVar[int]
    HAS_STATE_FIELD_NUMBER: _ClassVar[int]
    REDUCED_FIELD_NUMBER: _ClassVar[int]
    UNITS_FIELD_NUMBER: _ClassVar[int]
    ROOTS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    COPIED_FIELD_NUMBER: _ClassVar[int]
    COPIED_STEP_FIELD_NUMBER: _ClassVar[int]
    BEGAN_FIELD_NUMBER: _ClassVar[int]
    CLOSED_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    round: int
    promise: int
    entered: int
    has_state: bool
    reduced: int
    units: int
    roots: _containers.RepeatedCompositeFieldContainer[TreeNode]
    running: int
    kept: int
    copied: int
    copied_step: int
    began: str
    closed: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, worker_id: _Optional[str] = ..., round: _Optional[int] = ..., promise: _Optional[int] = ..., entered: _Optional[int] = ..., has_state: bool = ..., reduced: _Optional[int] = ..., units: _Optional[int] = ..., roots: _Optional[_Iterable[_Union[TreeNode, _Mapping]]] = ..., running: _Optional[int] = ..., kept: _Optional[int] = ..., copied: _Optional[int] = ..., copied_step: _Optional[int] = ..., began: _Optional[str] = ..., closed: _Optional[_Iterable[str]] = ...) -> None: ...

class RingUp(_message.Message):
    __slots__ = ("worker_id", "generation")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    generation: int
    def __init__(self, worker_id: _Optional[str] = ..., generation: _Optional[int] = ...) -> None: ...

class RingBroken(_message.Message):
    __slots__ = ("worker_id", "generation", "because")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    BECAUSE_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    generation: int
    because: str
    def __init__(self, worker_id: _Optional[str] = ..., generation: _Optional[int] = ..., because: _Optional[str] = ...) -> None: ...

class BuildFailed(_message.Message):
    __slots__ = ("worker_id", "generation", "unreachable", "because")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    UNREACHABLE_FIELD_NUMBER: _ClassVar[int]
    BECAUSE_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    generation: int
    unreachable: _containers.RepeatedScalarFieldContainer[str]
    because: str
    def __init__(self, worker_id: _Optional[str] = ..., generation: _Optional[int] = ..., unreachable: _Optional[_Iterable[str]] = ..., because: _Optional[str] = ...) -> None: ...

class Progress(_message.Message):
    __slots__ = ("worker_id", "generation", "reduced", "applied", "phase", "shards", "shard_us", "exchange_us", "doing", "for_ms", "usual_ms", "computes", "over", "over_because", "min_replicas", "grace_ms", "replicas")
    class Doing(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        DOING_UNKNOWN: _ClassVar[Progress.Doing]
        ELSEWHERE: _ClassVar[Progress.Doing]
        SHARD: _ClassVar[Progress.Doing]
        WAITING: _ClassVar[Progress.Doing]
        DECLARED: _ClassVar[Progress.Doing]
        EVALUATION: _ClassVar[Progress.Doing]
    DOING_UNKNOWN: Progress.Doing
    ELSEWHERE: Progress.Doing
    SHARD: Progress.Doing
    WAITING: Progress.Doing
    DECLARED: Progress.Doing
    EVALUATION: Progress.Doing
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    REDUCED_FIELD_NUMBER: _ClassVar[int]
    APPLIED_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    SHARD_US_FIELD_NUMBER: _ClassVar[int]
    EXCHANGE_US_FIELD_NUMBER: _ClassVar[int]
    DOING_FIELD_NUMBER: _ClassVar[int]
    FOR_MS_FIELD_NUMBER: _ClassVar[int]
    USUAL_MS_FIELD_NUMBER: _ClassVar[int]
    COMPUTES_FIELD_NUMBER: _ClassVar[int]
    OVER_FIELD_NUMBER: _ClassVar[int]
    OVER_BECAUSE_FIELD_NUMBER: _ClassVar[int]
    MIN_REPLICAS_FIELD_NUMBER: _ClassVar[int]
    GRACE_MS_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    generation: int
    reduced: int
    applied: int
    phase: str
    shards: int
    shard_us: int
    exchange_us: int
    doing: Progress.Doing
    for_ms: int
    usual_ms: int
    computes: bool
    over: str
    over_because: str
    min_replicas: int
    grace_ms: int
    replicas: int
    def __init__(self, worker_id: _Optional[str] = ..., generation: _Optional[int] = ..., reduced: _Optional[int] = ..., applied: _Optional[int] = ..., phase: _Optional[str] = ..., shards: _Optional[int] = ..., shard_us: _Optional[int] = ..., exchange_us: _Optional[int] = ..., doing: _Optional[_Union[Progress.Doing, str]] = ..., for_ms: _Optional[int] = ..., usual_ms: _Optional[int] = ..., computes: bool = ..., over: _Optional[str] = ..., over_because: _Optional[str] = ..., min_replicas: _Optional[int] = ..., grace_ms: _Optional[int] = ..., replicas: _Optional[int] = ...) -> None: ...

class Ready(_message.Message):
    __slots__ = ("worker_id", "generation", "outdated", "hold")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    OUTDATED_FIELD_NUMBER: _ClassVar[int]
    HOLD_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    generation: int
    outdated: int
    hold: bool
    def __init__(self, worker_id: _Optional[str] = ..., generation: _Optional[int] = ..., outdated: _Optional[int] = ..., hold: bool = ...) -> None: ...

class DrainWish(_message.Message):
    __slots__ = ("worker_id", "because", "left_ms")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    BECAUSE_FIELD_NUMBER: _ClassVar[int]
    LEFT_MS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    because: str
    left_ms: int
    def __init__(self, worker_id: _Optional[str] = ..., because: _Optional[str] = ..., left_ms: _Optional[int] = ...) -> None: ...

class DrainOver(_message.Message):
    __slots__ = ("worker_id",)
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    def __init__(self, worker_id: _Optional[str] = ...) -> None: ...

class Left(_message.Message):
    __slots__ = ("worker_id", "generation")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    generation: int
    def __init__(self, worker_id: _Optional[str] = ..., generation: _Optional[int] = ...) -> None: ...

class Finished(_message.Message):
    __slots__ = ("worker_id", "generation", "digest")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    generation: int
    digest: str
    def __init__(self, worker_id: _Optional[str] = ..., generation: _Optional[int] = ..., digest: _Optional[str] = ...) -> None: ...

class Failed(_message.Message):
    __slots__ = ("worker_id", "generation", "place", "message", "exit_code", "of_device", "newcomer", "samples")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    EXIT_CODE_FIELD_NUMBER: _ClassVar[int]
    OF_DEVICE_FIELD_NUMBER: _ClassVar[int]
    NEWCOMER_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    generation: int
    place: str
    message: str
    exit_code: int
    of_device: bool
    newcomer: bool
    samples: str
    def __init__(self, worker_id: _Optional[str] = ..., generation: _Optional[int] = ..., place: _Optional[str] = ..., message: _Optional[str] = ..., exit_code: _Optional[int] = ..., of_device: bool = ..., newcomer: bool = ..., samples: _Optional[str] = ...) -> None: ...

class WorkerDead(_message.Message):
    __slots__ = ("worker_id", "because", "snapshot", "failure", "where")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    BECAUSE_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    WHERE_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    because: str
    snapshot: str
    failure: str
    where: str
    def __init__(self, worker_id: _Optional[str] = ..., because: _Optional[str] = ..., snapshot: _Optional[str] = ..., failure: _Optional[str] = ..., where: _Optional[str] = ...) -> None: ...

class WorkerFrozen(_message.Message):
    __slots__ = ("worker_id", "because")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    BECAUSE_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    because: str
    def __init__(self, worker_id: _Optional[str] = ..., because: _Optional[str] = ...) -> None: ...

class Corrupted(_message.Message):
    __slots__ = ("worker_id", "generation", "suspect", "because")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    SUSPECT_FIELD_NUMBER: _ClassVar[int]
    BECAUSE_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    generation: int
    suspect: str
    because: str
    def __init__(self, worker_id: _Optional[str] = ..., generation: _Optional[int] = ..., suspect: _Optional[str] = ..., because: _Optional[str] = ...) -> None: ...

class SlotGivenUp(_message.Message):
    __slots__ = ("node", "slot", "because", "exit_code")
    NODE_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    BECAUSE_FIELD_NUMBER: _ClassVar[int]
    EXIT_CODE_FIELD_NUMBER: _ClassVar[int]
    node: str
    slot: int
    because: str
    exit_code: int
    def __init__(self, node: _Optional[str] = ..., slot: _Optional[int] = ..., because: _Optional[str] = ..., exit_code: _Optional[int] = ...) -> None: ...

class CheckpointComplete(_message.Message):
    __slots__ = ("worker_id", "series", "entry")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    SERIES_FIELD_NUMBER: _ClassVar[int]
    ENTRY_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    series: str
    entry: str
    def __init__(self, worker_id: _Optional[str] = ..., series: _Optional[str] = ..., entry: _Optional[str] = ...) -> None: ...

class Unreadable(_message.Message):
    __slots__ = ("worker_id", "entry", "because", "memory", "instead")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ENTRY_FIELD_NUMBER: _ClassVar[int]
    BECAUSE_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    INSTEAD_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    entry: str
    because: str
    memory: bool
    instead: str
    def __init__(self, worker_id: _Optional[str] = ..., entry: _Optional[str] = ..., because: _Optional[str] = ..., memory: bool = ..., instead: _Optional[str] = ...) -> None: ...

class Order(_message.Message):
    __slots__ = ("quiesce", "publish", "fence", "kill", "release", "close", "drain", "invite", "pointed", "home", "end_round")
    QUIESCE_FIELD_NUMBER: _ClassVar[int]
    PUBLISH_FIELD_NUMBER: _ClassVar[int]
    FENCE_FIELD_NUMBER: _ClassVar[int]
    KILL_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    CLOSE_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    INVITE_FIELD_NUMBER: _ClassVar[int]
    POINTED_FIELD_NUMBER: _ClassVar[int]
    HOME_FIELD_NUMBER: _ClassVar[int]
    END_ROUND_FIELD_NUMBER: _ClassVar[int]
    quiesce: Quiesce
    publish: Publish
    fence: Fence
    kill: Kill
    release: Release
    close: Close
    drain: Drain
    invite: Invite
    pointed: Pointed
    home: Home
    end_round: EndRound
    def __init__(self, quiesce: _Optional[_Union[Quiesce, _Mapping]] = ..., publish: _Optional[_Union[Publish, _Mapping]] = ..., fence: _Optional[_Union[Fence, _Mapping]] = ..., kill: _Optional[_Union[Kill, _Mapping]] = ..., release: _Optional[_Union[Release, _Mapping]] = ..., close: _Optional[_Union[Close, _Mapping]] = ..., drain: _Optional[_Union[Drain, _Mapping]] = ..., invite: _Optional[_Union[Invite, _Mapping]] = ..., pointed: _Optional[_Union[Pointed, _Mapping]] = ..., home: _Optional[_Union[Home, _Mapping]] = ..., end_round: _Optional[_Union[EndRound, _Mapping]] = ...) -> None: ...

class Quiesce(_message.Message):
    __slots__ = ("term", "round", "up_to")
    TERM_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    UP_TO_FIELD_NUMBER: _ClassVar[int]
    term: int
    round: int
    up_to: int
    def __init__(self, term: _Optional[int] = ..., round: _Optional[int] = ..., up_to: _Optional[int] = ...) -> None: ...

class Publish(_message.Message):
    __slots__ = ("term", "generation")
    TERM_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    term: int
    generation: Generation
    def __init__(self, term: _Optional[int] = ..., generation: _Optional[_Union[Generation, _Mapping]] = ...) -> None: ...

class Fence(_message.Message):
    __slots__ = ("term", "worker_id", "because")
    TERM_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    BECAUSE_FIELD_NUMBER: _ClassVar[int]
    term: int
    worker_id: str
    because: str
    def __init__(self, term: _Optional[int] = ..., worker_id: _Optional[str] = ..., because: _Optional[str] = ...) -> None: ...

class Kill(_message.Message):
    __slots__ = ("term", "worker_id")
    TERM_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    term: int
    worker_id: str
    def __init__(self, term: _Optional[int] = ..., worker_id: _Optional[str] = ...) -> None: ...

class Release(_message.Message):
    __slots__ = ("term", "worker_id")
    TERM_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    term: int
    worker_id: str
    def __init__(self, term: _Optional[int] = ..., worker_id: _Optional[str] = ...) -> None: ...

class Close(_message.Message):
    __slots__ = ("term", "because", "exit_code")
    TERM_FIELD_NUMBER: _ClassVar[int]
    BECAUSE_FIELD_NUMBER: _ClassVar[int]
    EXIT_CODE_FIELD_NUMBER: _ClassVar[int]
    term: int
    because: str
    exit_code: int
    def __init__(self, term: _Optional[int] = ..., because: _Optional[str] = ..., exit_code: _Optional[int] = ...) -> None: ...

class Drain(_message.Message):
    __slots__ = ("term", "worker_id", "left_ms", "because", "signalled", "kind", "said_by", "over")
    TERM_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    LEFT_MS_FIELD_NUMBER: _ClassVar[int]
    BECAUSE_FIELD_NUMBER: _ClassVar[int]
    SIGNALLED_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    SAID_BY_FIELD_NUMBER: _ClassVar[int]
    OVER_FIELD_NUMBER: _ClassVar[int]
    term: int
    worker_id: str
    left_ms: int
    because: str
    signalled: bool
    kind: str
    said_by: str
    over: bool
    def __init__(self, term: _Optional[int] = ..., worker_id: _Optional[str] = ..., left_ms: _Optional[int] = ..., because: _Optional[str] = ..., signalled: bool = ..., kind: _Optional[str] = ..., said_by: _Optional[str] = ..., over: bool = ...) -> None: ...

class Invite(_message.Message):
    __slots__ = ("term", "worker_id")
    TERM_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    term: int
    worker_id: str
    def __init__(self, term: _Optional[int] = ..., worker_id: _Optional[str] = ...) -> None: ...

class Home(_message.Message):
    __slots__ = ("term", "worker_id", "home")
    TERM_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    HOME_FIELD_NUMBER: _ClassVar[int]
    term: int
    worker_id: str
    home: int
    def __init__(self, term: _Optional[int] = ..., worker_id: _Optional[str] = ..., home: _Optional[int] = ...) -> None: ...

class EndRound(_message.Message):
    __slots__ = ("term", "worker_id", "generation", "op")
    TERM_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    OP_FIELD_NUMBER: _ClassVar[int]
    term: int
    worker_id: str
    generation: int
    op: int
    def __init__(self, term: _Optional[int] = ..., worker_id: _Optional[str] = ..., generation: _Optional[int] = ..., op: _Optional[int] = ...) -> None: ...

class Pointed(_message.Message):
    __slots__ = ("term", "worker_id", "series", "entry", "holds")
    TERM_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    SERIES_FIELD_NUMBER: _ClassVar[int]
    ENTRY_FIELD_NUMBER: _ClassVar[int]
    HOLDS_FIELD_NUMBER: _ClassVar[int]
    term: int
    worker_id: str
    series: str
    entry: str
    holds: bool
    def __init__(self, term: _Optional[int] = ..., worker_id: _Optional[str] = ..., series: _Optional[str] = ..., entry: _Optional[str] = ..., holds: bool = ...) -> None: ...
