/* Planned changes: who joins and who drains, mixed with losses, changes of the leader, and drains taken back.
 *
 * Three members a, b, c of which one may drain, and a newcomer n. They step for ever: operations are counted relative
 * to the slowest member, so the search has no last operation. What is atomic here and is not in the product, and what
 * is not modelled at all, says README.md.
 *
 *   here                                   there
 *   Step: header                           elastic/protocol/worker_state/pending.py to_carry, missing
 *   Step: result                           elastic/protocol/worker_state/operation.py obtained; pending.py taking_effect
 *   Step: leave                            AwaitAcknowledgements, Acknowledged -> Left; planned_changes.py left
 *   Step: catch up                         elastic/protocol/worker_state/generation_change.py _fall_behind; operation.py fetched
 *   Orders: publish, quiesce, loss         elastic/protocol/worker_state/generation_change.py planned, quiesce, enter_loss
 *   Newcomer: copy, outcome, join          elastic/protocol/worker_state/next_move.py seek; pending.py outcome; generation_change.py joined
 *   Leader: plan, LISTED, EARLY_FIRST      elastic/protocol/membership/planned_changes.py plan_change, _leaves_early
 *   Leader: quiesce, decide                elastic/protocol/membership/loss.py; elastic/protocol/recovery_plan.py decide_loss
 *   Leader: replace_stuck                  elastic/protocol/membership/planned_changes.py replace_stuck
 *   Leader: heard                          Group.running: what a leader has been told, which may be late
 *   list[], early, top, aim                Group.chain: the records since the last loss, renumbered from 0 by each loss
 *
 * Claims: all members take the same outcome of an operation, in the same ring [agree]; members differ by at most one
 * operation [one]; nobody who did not ask to leave is left out by a planned change [kept], and nobody whom the newest
 * plan of any member of the ring keeps [newest]; the members of a loss generation can go on together [loss]; no state
 * from which nothing moves [stuck]; under weak fairness, a drained member leaves though the newcomer never gets its
 * copy [drained_leaves], and a newcomer whose copy is waited for gets in [newcomer_joins].
 *
 * Sizes: MEMBERS (bits of a, b, c), CRASHES, LEADERS (changes), QUIESCES (without a loss), TAKEN_BACK.
 * Planted faults: NO_KEEP_RULE EARLY_IS_NEWEST NO_EARLY JOIN_UNHELD UPDATES_HEADER LEAVE_AT_ONCE GIVES_UP
 * For liveness: RINGS_UP (of pending generations, at once), NEVER_COPIED, LINGER (the donor waits for the copy).
 * EARLY_ONCE: a missing early generation is looked for only with a new wish. ANY_ORDER: records are told in any order.
 */
#ifndef MEMBERS
#define MEMBERS 7
#endif
#ifndef DRAINER
#define DRAINER 2
#endif
#ifndef DRAINS
#define DRAINS 1
#endif
#ifndef TAKEN_BACK
#define TAKEN_BACK 0
#endif
#ifndef JOINS
#define JOINS 1
#endif
#ifndef CRASHES
#define CRASHES 0
#endif
#ifndef LEADERS
#define LEADERS 0
#endif
#ifndef QUIESCES
#define QUIESCES 0
#endif
#ifndef RECORDS
#define RECORDS 8
#endif

#define WORKERS 4
#define n 3
#define NEWCOMER BIT(n)
#define BIT(w) (1 << (w))
#define IN(w, workers) (((workers) >> (w)) & 1)
#define NONE 15

/* life */
#define ABSENT 0
#define FRESH 1
#define MEMBER 2
#define LEFT 3
#define DEAD 4

/* operations, relative to the slowest member */
#define NO_COPY 0
#define OLD 1
#define LAST 2
#define LOW 3
#define HIGH 4

/* durable */
byte list[RECORDS];
byte early;              /* bits of records */
byte top, aim;

/* workers */
byte life[WORKERS], ring[WORKERS], op[WORKERS], known[WORKERS], leaving[WORKERS], copied;
bool reported[WORKERS], lagging[WORKERS], behind[WORKERS];
byte sent_in[WORKERS * 2], carried[WORKERS * 2], keeps[WORKERS * 2];   /* headers of LOW and HIGH */
byte promise;            /* of the newcomer; a member that has reported learns nothing before the next loss */

/* the leader's memory, and what is true of the drainer's node */
bool quiescing, knows_join, knows_drain, wishes, ever_wished, lost;
byte heard;
byte crashes = CRASHES, leaders = LEADERS, quiesces = QUIESCES, drains = DRAINS, taken_back = TAKEN_BACK, joins = JOINS;

/* what the claims remember */
byte took_effect[HIGH + 2], in_ring[HIGH + 2];

#define HEADER(w, o) ((w) * 2 + (o) - LOW)
#define LIVES(w) (life[w] == MEMBER || life[w] == FRESH)
#define DEAD_ONES ((life[0] == DEAD) | (life[1] == DEAD) << 1 | (life[2] == DEAD) << 2 | (life[3] == DEAD) << 3)
#define IN_RING(w) (life[w] == MEMBER && ring[w] != NONE && !reported[w])
#define STEPS(w) (IN_RING(w) && !lagging[w] && !leaving[w])
#define EVERY(f) (f(0) && f(1) && f(2) && f(3))
#define SOME(f) (f(0) || f(1) || f(2) || f(3))
#define LOWEST_BIT(m) ((m) & 1 -> 0 : ((m) & 2 -> 1 : ((m) & 4 -> 2 : 3)))
#define HIGHEST_BIT(m) ((m) & 128 -> 7 : ((m) & 64 -> 6 : ((m) & 32 -> 5 : ((m) & 16 -> 4 : ((m) & 8 -> 3 : \
                        ((m) & 4 -> 2 : ((m) & 2 -> 1 : 0)))))))
#define LOWEST_RECORD(m) ((m) & 2 -> 1 : ((m) & 4 -> 2 : ((m) & 8 -> 3 : ((m) & 16 -> 4 : ((m) & 32 -> 5 : \
                          ((m) & 64 -> 6 : 7))))))

/* pending: known records above the one entered */
#define PENDING(w) (known[w] & ~((2 << ring[w]) - 1))
#ifdef EARLY_IS_NEWEST
#define NEWEST(w) HIGHEST_BIT(PENDING(w))
#else
#define NEWEST(w) HIGHEST_BIT(PENDING(w) & ~early)
#endif

#ifdef RINGS_UP
#define MAY_BE_DOWN 0
#else
#define MAY_BE_DOWN 1    /* the ring of a pending generation is not built yet */
#endif
/* Whom the outcome of its operation leaves out is not waited for: it may read its last result late. */
#define LEFT_OUT(w) (took_effect[op[w]] > 1 && !IN(w, list[took_effect[op[w]] - 1]))
#define COUNTS(w) (life[w] == MEMBER && !leaving[w] && !LEFT_OUT(w))
#define SLOW(w) (COUNTS(w) && op[w] == LOW)
#define FAST(w) (COUNTS(w) && op[w] >= HIGH)

inline shift_if_all_are_ahead() {
  if
  :: (!SLOW(0) && !SLOW(1) && !SLOW(2) && !SLOW(3) && (FAST(0) || FAST(1) || FAST(2) || FAST(3))) ->
     x = 0;
     do
     :: x < WORKERS ->
        if
        :: op[x] > LOW -> op[x] = op[x] - 1
        :: op[x] == LOW && life[x] == MEMBER ->
           behind[x] = 1;
           if :: leaving[x] == 0 -> leaving[x] = took_effect[LOW] - 1 :: else fi
        :: else
        fi;
        sent_in[HEADER(x, LOW)] = sent_in[HEADER(x, HIGH)]; sent_in[HEADER(x, HIGH)] = NONE;
        carried[HEADER(x, LOW)] = carried[HEADER(x, HIGH)]; carried[HEADER(x, HIGH)] = 0;
        keeps[HEADER(x, LOW)] = keeps[HEADER(x, HIGH)]; keeps[HEADER(x, HIGH)] = 0;
        x++
     :: else -> break
     od;
     x = 0;
     if :: copied > OLD -> copied = copied - 1 :: else fi;
     took_effect[LAST] = took_effect[LOW]; took_effect[LOW] = took_effect[HIGH]; took_effect[HIGH] = 0;
     in_ring[LAST] = 0; in_ring[LOW] = in_ring[HIGH]; in_ring[HIGH] = 0
  :: else
  fi
}
#define HELD_BACK(w, newest) \
  (IN(n, list[newest]) && !IN(n, list[ring[w]]) && w == LOWEST_BIT(list[ring[w]]) && copied != op[w])
#ifdef JOIN_UNHELD
#define MAY_CARRY(w, newest) (newest != 0)
#else
#define MAY_CARRY(w, newest) (newest != 0 && !HELD_BACK(w, newest))
#endif

#ifdef LINGER
#define LINGERS(w) (NEWEST(w) != 0 && HELD_BACK(w, NEWEST(w)))    /* however long the copy takes */
#else
#define LINGERS(w) 0
#endif

inline choose_carried(w) {
  newest = NEWEST(w);
  keep = list[ring[w]] & list[newest];
  x = 1; also = 0;
  do
  :: x <= top && newest != 0 ->
     if
#ifdef NO_KEEP_RULE
     :: x != newest && IN(x, PENDING(w)) && IN(x, early) -> also = x
#else
     :: x != newest && IN(x, PENDING(w)) && list[x] == keep && keep != list[ring[w]] &&
        (list[newest] & ~list[ring[w]]) -> also = x
#endif
     :: else
     fi;
     x++
  :: else -> break
  od;
  x = 0
}

#define HAS_SENT(w, x) (!IN(x, list[ring[w]]) || (sent_in[HEADER(x, op[w])] == ring[w] && life[x] != LEFT))
#define ALL_SENT(w) (HAS_SENT(w, 0) && HAS_SENT(w, 1) && HAS_SENT(w, 2) && HAS_SENT(w, 3))
#define CARRIES(w, x) (IN(x, list[ring[w]]) -> carried[HEADER(x, op[w])] : 255)
#define COMMON(w) (CARRIES(w, 0) & CARRIES(w, 1) & CARRIES(w, 2) & CARRIES(w, 3))
#define KEEPS(w, x) (IN(x, list[ring[w]]) -> keeps[HEADER(x, op[w])] : 0)
#define HAS_LAST(w, x) (!IN(x, list[leaving[w]] & list[ring[w]]) || life[x] == LEFT || \
                        (life[x] == MEMBER && (op[x] >= op[w] || behind[w])))

proctype Step(byte w) {
  byte x, newest, keep, also, common, out;
  do
  :: atomic { STEPS(w) && sent_in[HEADER(w, op[w])] != ring[w] && !LINGERS(w) ->
       d_step { choose_carried(w);
         sent_in[HEADER(w, op[w])] = ring[w];
         keeps[HEADER(w, op[w])] = (newest -> list[newest] : 0);
         carried[HEADER(w, op[w])] = 0 }
       if :: MAY_CARRY(w, newest) -> carried[HEADER(w, op[w])] = BIT(newest)
          :: !MAY_CARRY(w, newest) || MAY_BE_DOWN                                      /* _is_up */
       fi;
       if :: also != 0 -> carried[HEADER(w, op[w])] = carried[HEADER(w, op[w])] | BIT(also)
          :: also == 0 || MAY_BE_DOWN
       fi;
       newest = 0; keep = 0; also = 0 }
  :: d_step { STEPS(w) && ALL_SENT(w) ->
       common = (COMMON(w) & PENDING(w)); out = HIGHEST_BIT(common);
       assert(took_effect[op[w]] == 0 || took_effect[op[w]] == out + 1);              /* [agree] */
       assert(in_ring[op[w]] == 0 || in_ring[op[w]] == ring[w] + 1);                  /* [agree] */
       took_effect[op[w]] = out + 1; in_ring[op[w]] = ring[w] + 1;
       if
       :: out != 0 ->
          keep = list[ring[w]] & ~list[out] & ~DEAD_ONES;                             /* who is left out */
          assert((keep & ~(ever_wished << DRAINER)) == 0);                            /* [kept] */
#ifndef NO_NEWEST_CLAIM
          assert((keep & (KEEPS(w, 0) | KEEPS(w, 1) | KEEPS(w, 2) | KEEPS(w, 3))) == 0) /* [newest] */
#endif
       :: else
       fi;
       op[w] = op[w] + 1;
       if
       :: out != 0 && IN(w, list[out]) -> ring[w] = out; known[w] = PENDING(w)
       :: out != 0 && !IN(w, list[out]) -> leaving[w] = out
       :: else
       fi;
       shift_if_all_are_ahead();
       assert(op[w] <= HIGH);                                                         /* [one] */
       common = 0; out = 0; keep = 0 }
#ifdef LEAVE_AT_ONCE
  :: atomic { IN_RING(w) && leaving[w] -> life[w] = LEFT; ring[w] = NONE; known[w] = 0; behind[w] = 0; leaving[w] = 0 }
#else
  :: d_step { IN_RING(w) && leaving[w] && HAS_LAST(w, 0) && HAS_LAST(w, 1) && HAS_LAST(w, 2) && HAS_LAST(w, 3) ->
       life[w] = LEFT; if :: heard < leaving[w] -> heard = leaving[w] :: else fi;
       ring[w] = NONE; known[w] = 0; behind[w] = 0; leaving[w] = 0 }
#endif
  :: d_step { IN_RING(w) && lagging[w] -> op[w] = op[w] + 1; lagging[w] = 0; shift_if_all_are_ahead() }
  od
}

/* ---- orders from the leader: in any order, with any delay ---- */
#define UNKNOWN(w) (((2 << top) - 1) & ~known[w] & ~((2 << (ring[w] == NONE -> promise : ring[w])) - 1))
#define LEARNS(w) ((IN_RING(w) && !leaving[w]) || (life[w] == FRESH && !quiescing))
proctype Orders(byte w) {
  byte x;
  do
  :: atomic { LEARNS(w) && UNKNOWN(w) ->
       x = LOWEST_RECORD(UNKNOWN(w));
#ifdef ANY_ORDER
       if :: x = LOWEST_RECORD(UNKNOWN(w)) :: x = HIGHEST_BIT(UNKNOWN(w)) fi;
#endif
       known[w] = known[w] | BIT(x);
#ifdef UPDATES_HEADER
       if :: STEPS(w) && sent_in[HEADER(w, op[w])] == ring[w] ->
             carried[HEADER(w, op[w])] = carried[HEADER(w, op[w])] | BIT(x)
          :: else fi;
#endif
       x = 0 }
  :: atomic { quiescing && LIVES(w) && !reported[w] ->
       reported[w] = 1;
       if :: w == n && life[n] == FRESH -> known[n] = 0; promise = top :: else fi }
  :: atomic { life[w] == MEMBER && ring[w] == NONE && !reported[w] && IN(w, list[0]) -> ring[w] = 0 }
  od
}

/* ---- the newcomer ---- */
#define WAITS (life[n] == FRESH && !reported[n])
#define ADMITTED (WAITS && known[n] != 0 && IN(n, list[HIGHEST_BIT(known[n] & ~early)]))
#define SERVES(w) (STEPS(w) && sent_in[HEADER(w, op[w])] != ring[w] && copied != op[w])
#define IS_PAST(w) (life[w] == MEMBER && op[w] > copied)
#define OUTCOME (took_effect[copied] - 1)
#define IS_AWAITED (took_effect[copied] > 1 && IN(n, list[OUTCOME]))
#define KNOWS_OUTCOME (IN(OUTCOME, known[n]))
#ifdef GIVES_UP
#define MAY_COPY (copied <= OLD || (SOME(IS_PAST) && !(IS_AWAITED && KNOWS_OUTCOME)))
#else
#define MAY_COPY (copied <= OLD || (SOME(IS_PAST) && !IS_AWAITED))    /* given up on a definite answer only */
#endif
proctype Newcomer() {
  byte x;
  do
#ifndef NEVER_COPIED
  :: atomic { ADMITTED && MAY_COPY && SOME(SERVES) ->
       if :: SERVES(0) -> copied = op[0] :: SERVES(1) -> copied = op[1] :: SERVES(2) -> copied = op[2] fi }
#endif
  :: d_step { WAITS && copied >= LAST && SOME(IS_PAST) && IS_AWAITED && KNOWS_OUTCOME ->
       life[n] = MEMBER; op[n] = copied + 1; ring[n] = OUTCOME; known[n] = PENDING(n); copied = NO_COPY;
       shift_if_all_are_ahead() }
  od
}

/* ---- the leader ---- */
#define READY (knows_join && life[n] == FRESH && !IN(n, list[aim]) -> NEWCOMER : 0)
#define STANDING (list[aim] & ~(list[aim] & ~list[heard] & DEAD_ONES))
#define HOLDERS (STANDING & list[heard])
#define DRAINING (knows_drain << DRAINER)
#define STAY (HOLDERS & ~DRAINING -> HOLDERS & ~DRAINING : HOLDERS)   /* the last to hold the state wait for another */
#define LISTED ((STANDING & ~(DRAINING & ~STAY)) | READY)
#define KEPT (list[heard] & LISTED)
#define IS_PLANNED(x) ((x) > heard && (x) <= top && list[x] == KEPT)
#define KEPT_IS_PLANNED (IS_PLANNED(1) || IS_PLANNED(2) || IS_PLANNED(3) || IS_PLANNED(4) || IS_PLANNED(5) || \
                         IS_PLANNED(6) || IS_PLANNED(7))
#ifdef NO_EARLY
#define EARLY_FIRST 0
#else
#define EARLY_FIRST (KEPT != 0 && KEPT != list[heard] && (LISTED & ~list[heard]) && !KEPT_IS_PLANNED)
#endif
#ifdef EARLY_ONCE
#define CHANGE (HOLDERS != 0 && !(aim == top && LISTED == list[aim]))
#else
#define CHANGE (HOLDERS != 0 && (EARLY_FIRST || !(aim == top && LISTED == list[aim])))
#endif

#define HAS_DEAD(w) (IN_RING(w) && (list[ring[w]] & DEAD_ONES))
#define IS_STRANDED(w) (life[w] == MEMBER && reported[w])
/* It will enter none of the generations that wait for it, and no leader knows. */
#define HAS_PROMISED (life[n] == FRESH && reported[n])
#define BROKEN (SOME(HAS_DEAD) || SOME(IS_STRANDED) || (list[heard] & DEAD_ONES))
#define NEWS(w) (life[w] == MEMBER && ring[w] != NONE && ring[w] > heard)
/* Newcomers that no list has answer only where they may hold the last copy: here all that live do. */
#define REPORTED(w) (!LIVES(w) || reported[w])
#define ALL_ANSWERED EVERY(REPORTED)

proctype Leader() {
  byte x, y, everybody, holders, chosen;
  bool entered;
  do
  :: atomic { SOME(NEWS) -> if :: NEWS(0) -> heard = ring[0] :: NEWS(1) -> heard = ring[1]
                               :: NEWS(2) -> heard = ring[2] :: NEWS(3) -> heard = ring[3] fi }
  :: atomic { !knows_join && life[n] == FRESH -> knows_join = 1 }
  :: atomic { knows_drain != wishes -> knows_drain = wishes }
  :: d_step { !quiescing && !BROKEN && CHANGE ->
       assert(top + 1 < RECORDS);
       if
       :: EARLY_FIRST -> x = KEPT; top++; list[top] = x; early = early | BIT(top)
       :: else -> x = LISTED; top++; list[top] = x; aim = top
       fi;
       x = 0 }
  :: atomic { !quiescing && BROKEN -> quiescing = 1 }
  :: d_step { !quiescing && HAS_PROMISED && IN(n, list[heard] | list[aim]) ->            /* replace_stuck */
       life[n] = DEAD; known[n] = 0; reported[n] = 0; copied = NO_COPY }
  :: d_step { quiescing && !lost && ALL_ANSWERED ->
       x = 0; everybody = 0; holders = 0; chosen = 0;
       do :: x <= top -> everybody = everybody | list[x]; x++ :: else -> break od;
       x = 0;
       do
       :: x < WORKERS ->
          if :: life[x] == MEMBER && reported[x] && IN(x, everybody) -> holders = holders | BIT(x) :: else fi; x++
       :: else -> break
       od;
       y = top + 1;
       do
       :: y > 0 && chosen == 0 ->
          y--; x = 0; entered = 0;
          do :: x < WORKERS -> entered = entered || (IN(x, holders) && ring[x] == y); x++ :: else -> break od;
          if :: entered -> chosen = holders & list[y] :: else fi
       :: else -> break
       od;
       if :: chosen == 0 -> chosen = holders :: else fi;
       if
       :: chosen == 0 && life[n] == FRESH && copied != NO_COPY ->                     /* the only copy of the state */
          chosen = NEWCOMER; life[n] = MEMBER; op[n] = LOW; copied = NO_COPY
       :: else
       fi;
       if
       :: chosen == 0 -> lost = 1
       :: else ->
          y = 0; x = 0;                                                               /* y: where to resume */
          do :: x < WORKERS -> if :: IN(x, chosen) && op[x] > y -> y = op[x] :: else fi; x++ :: else -> break od;
          x = 0;
          do
          :: x < WORKERS ->
             if
             :: IN(x, chosen) ->
                assert(op[x] + 1 >= y && (!behind[x] || chosen == BIT(x)));           /* [loss] */
                lagging[x] = (op[x] < y); behind[x] = 0; leaving[x] = 0
             :: life[x] == MEMBER && !IN(x, chosen) ->
                life[x] = LEFT; lagging[x] = 0; behind[x] = 0; leaving[x] = 0; op[x] = LOW
             :: else
             fi;
             if :: life[x] == MEMBER || life[x] == LEFT -> ring[x] = NONE :: else fi;
             reported[x] = 0; known[x] = 0;
             sent_in[HEADER(x, LOW)] = NONE; sent_in[HEADER(x, HIGH)] = NONE;
             carried[HEADER(x, LOW)] = 0; carried[HEADER(x, HIGH)] = 0;
             keeps[HEADER(x, LOW)] = 0; keeps[HEADER(x, HIGH)] = 0;
             x++
          :: else -> break
          od;
          x = 0; do :: x < RECORDS -> list[x] = 0; x++ :: else -> break od;
          x = 0; do :: x < HIGH + 2 -> took_effect[x] = 0; in_ring[x] = 0; x++ :: else -> break od;
          list[0] = chosen; early = 0; top = 0; aim = 0; heard = 0; promise = 0; quiescing = 0;
          shift_if_all_are_ahead()
       fi;
       x = 0; y = 0; everybody = 0; holders = 0; chosen = 0; entered = 0 }
  od
}

/* ---- faults and wishes, each as often as its budget says, at any moment ---- */
proctype World() {
  byte x;
  do
  :: d_step { drains > 0 && life[DRAINER] == MEMBER -> drains--; wishes = 1; ever_wished = 1 }
  :: d_step { taken_back > 0 && wishes -> taken_back--; wishes = 0 }
  :: d_step { joins > 0 -> joins--; life[n] = FRESH }
  :: d_step { leaders > 0 -> leaders--; quiescing = 0; knows_join = 0; knows_drain = 0; heard = 0 }
  :: d_step { quiesces > 0 && !quiescing -> quiesces--; quiescing = 1 }
  :: atomic { crashes > 0 ->
       if :: LIVES(0) -> x = 0 :: LIVES(1) -> x = 1 :: LIVES(2) -> x = 2 :: LIVES(3) -> x = 3 fi;
       d_step { crashes--; life[x] = DEAD; ring[x] = NONE; op[x] = LOW; known[x] = 0; reported[x] = 0; lagging[x] = 0;
                leaving[x] = 0; behind[x] = 0;
                if :: x == n -> copied = NO_COPY :: else fi;
                x = 0; shift_if_all_are_ahead() } }
  od
}

#ifdef LIVENESS
ltl drained_leaves { [] (wishes -> <> (!wishes || life[DRAINER] >= LEFT || lost)) }
ltl newcomer_joins { [] (life[n] == FRESH -> <> (life[n] != FRESH || lost)) }
#else
proctype Watch() { timeout -> assert(lost) }                                          /* [stuck] */
#endif

init {
  byte x;
  atomic {
    do
    :: x < WORKERS ->
       ring[x] = NONE; sent_in[HEADER(x, LOW)] = NONE; sent_in[HEADER(x, HIGH)] = NONE; op[x] = LOW;
       if :: IN(x, MEMBERS) -> life[x] = MEMBER; ring[x] = 0; run Step(x); run Orders(x) :: else fi;
       x++
    :: else -> break
    od;
    list[0] = MEMBERS;
    run Step(n); run Orders(n); run Newcomer(); run Leader(); run World();
#ifndef LIVENESS
    run Watch();
#endif
    x = 0
  }
}
