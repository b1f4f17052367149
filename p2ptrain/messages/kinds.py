"""The messages of a training job: kinds, sender and receiver, checked fields.

Every frame carries (job, generation). Frames of another job or generation
are dropped and counted, from any sender. docs/internals/messages.md has the fields.
"""

# The messages of a job, in the order in which they are sent:
#
#   holder                coordinator             devices of the plan
#     |-- generation.report ------------------------->|   (stops, reports its state)
#     |-- links.measure, profile.measure ------------>|   (asks the holder for model.fetch)
#     |-- plan.ask ------->|                          |   (or a faster device, where that pays)
#     |<---- the plan -----|                          |   (no sign of work: passed over)
#     |-- generation.prepare ------------------------>|   (fetches its weights: state.read)
#     |<----------------------------------- ready ----|
#     |-- generation.begin -------------------------->|   to all members: others have no part
#     |
#     |-- train.round ------------------------------->|   what comes next, to every stage; or that
#     |                                               |   nothing does (asynchronous training)
#     |-- train.values (inputs, targets) ------------>|   to the first and the last stage
#     |        train.values: activations p -> p+1, gradients p+1 -> p, those of tied weights
#     |<- train.started ------------------------------|   credit: one more slice may come
#     |<- train.values (outputs) / train.norms -------|   norms where the job clips by global norm
#     |<- train.done ---------------------------------|   gradients complete, or all evaluated
#     |-- train.commit ------------------------------>|   all are done: the update counts, apply it
#     |<- train.failed -- train.diagnose ------------>|
#     |-- train.arrived ----------------------------->|   what arrived in a round that failed?
#     |-- train.standing ---------------------------->|   nothing moves: what do you wait for?
#     |-- trace.spans ------------------------------->|   what did you do when? (train --trace)
#     |-- device.energy ----------------------------->|   how many joules so far?
#     |<- job.explain --------------------------------|   any member: what limits it?
#     |-- job.alive --------------------------------->|   how far are you? (each second of a call)
#     |-- job.find ---------------------------------->|   to all members: what do you keep for me?
#     |        snapshot.offer: a stage's device -> its backup peer (reads: state.read)
#     |<- snapshot.kept ------------------------------|   whole there, or why it is not
#     |-- snapshot.backup_peer ---------------------->|   offer it to another device instead
#     |-- versions.keep ----------------------------->|   to all: what is older may go
#     |-- job.end ----------------------------------->|
STATE_REPORT = "generation.report"

PLAN = "plan.ask"

PLAN_END = "plan.ask.end"

PASSED_OVER = "coordinator.passed_over"

MEASURE_PROFILE = "profile.measure"

MEASURED = "profile.measured"

MEASURE_LINKS = "links.measure"

FETCH_MODEL = "model.fetch"

PREPARE = "generation.prepare"

BEGIN = "generation.begin"

STATE_MANIFEST = "state.manifest"

STATE_READ = "state.read"

ROUND = "train.round"

VALUES = "train.values"

STARTED = "train.started"

NORMS = "train.norms"

DONE = "train.done"

COMMIT = "train.commit"

SETTLED = "train.settled"

FAILED = "train.failed"

DIAGNOSE = "train.diagnose"

ARRIVED = "train.arrived"

SNAPSHOT_OFFER = "snapshot.offer"

SNAPSHOT_KEPT = "snapshot.kept"

BACKUP_PEER = "snapshot.backup_peer"

VERSIONS_KEEP = "versions.keep"

FIND = "job.find"

OVER = "job.over"

ALIVE = "job.alive"

STANDING = "train.standing"

SPANS = "trace.spans"

ENERGY = "device.energy"

FACTS = "job.facts"

EXPLAIN = "job.explain"

ROUND_PICTURE = "job.rounds"

LEAVING = "job.leaving"

LOG_SEND = "log.send"

FEED_SEND = "feed.send"

END = "job.end"

MODEL_LIMIT_BYTES = 64 << 20
"""Most bytes a model's description may take; a 12-layer GPT-2 takes about 100 kB."""
