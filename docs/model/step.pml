/* Operations and losses: units, sums in two phases, reports, the redo, false suspicion, changes of the leader, a join.
 *
 * Three workers a, b, c and three units. Two operations. Without JOIN all three are members; with it c is a newcomer
 * whose generation is planned from the start. What a worker has sent outlives it.
 *
 *   here                                   there
 *   Worker: begin, start, done             elastic/protocol/worker_state/operation.py begin, done
 *   Worker: header, slice, result          runtime: roots to the owners of slices, slices to all; obtained
 *   Worker: catch up                       operation.py fetched, or fetch_failed and all units computed alone
 *   Worker: report                         elastic/protocol/worker_state/generation_change.py quiesce
 *   Worker: enter                          generation_change.py enter_loss, _take_share, _fall_behind
 *   Worker: copy, join                     elastic/protocol/worker_state/next_move.py seek; generation_change.py joined
 *   Leader: quiesce, give up, decide       elastic/protocol/membership/loss.py; elastic/protocol/recovery_plan.py decide_loss, redo_shares
 *   number, list[], plan_*                 the committed records: durable, and each told to a worker with any delay
 *
 * Claims: members differ by at most one operation [one]; every sum has every unit exactly once [sum]; a ring that was
 * left by one of its members completes no more than the operation that is redone [fence]; who is behind finds the
 * result [source]; the plan fits where its members stand, wherever they have got to meanwhile [plan]; no state from
 * which nothing moves, before all have done [stuck].
 *
 * Sizes: CRASHES, SILENT (given up though alive: they go on in the old ring), LEADERS, QUIESCES (without a loss), JOIN.
 * Planted faults: NO_PROOF STALE_REPORT RUNNING_IS_MOVED OLD_ROOTS RESULT_FREED APPLIED_ONLY ADOPTS_ABORTED
 */
#ifndef CRASHES
#define CRASHES 0
#endif
#ifndef SILENT
#define SILENT 0
#endif
#ifndef LEADERS
#define LEADERS 0
#endif
#ifndef QUIESCES
#define QUIESCES 0
#endif
#ifdef JOIN
#define FIRST_LIST 3
#define FIRST_TOP 2
#else
#define FIRST_LIST 7
#define FIRST_TOP 1
#endif
#define WORKERS 3
#define ALL_UNITS 7
#define OPS 2
#define RECORDS 8
#define NOBODY 15
#define NAMED 8
#define NO_COPY 15
#define BIT(w) (1 << (w))
#define IN(w, some) (((some) >> (w)) & 1)
#define c 2

mtype:phase = { fresh, ready, collecting, dead };

/* durable: lists by number, and of the last loss generation the plan */
byte list[RECORDS], number = FIRST_TOP, base = 1, plan_op;
bool plan_has_units;
byte plan_units[WORKERS];

/* workers */
mtype:phase phase[WORKERS];
byte op[WORKERS];                     /* operations whose result was obtained */
byte ring[WORKERS], promise[WORKERS]; /* generation entered; the highest it has promised to stay out of */
byte roots[WORKERS], todo[WORKERS];   /* units: computed, and to compute */
byte running[WORKERS];                /* 0, or one bit */
byte share[WORKERS], share_op[WORKERS]; /* what the plan of its generation gave it, NAMED, for one operation */
bool kept[WORKERS], lagging[WORKERS];
byte copied = NO_COPY;                /* of c */

/* in flight: headers with roots, and sums of slices */
byte sent_ring[WORKERS], sent_op[WORKERS], sent_roots[WORKERS], slice_ring[WORKERS], slice_op[WORKERS];
bool carries[WORKERS];

/* the leader's memory */
bool quiescing, lost;
byte silent, reports;
#ifdef STALE_REPORT
byte said_op[WORKERS], said_roots[WORKERS];
#endif
byte crashes = CRASHES, silences = SILENT, leaders = LEADERS, quiesces = QUIESCES;

#define LIVES(w) (phase[w] != dead)
#define HAS_STATE(w) (phase[w] == ready || phase[w] == collecting)
#define LEFT_RING(w) (promise[w] >= ring[w])
#define STEPS(w) (phase[w] == collecting && ring[w] > promise[w])
#define SOME(f) (f(0) || f(1) || f(2))
#define EVERY(f) (f(0) && f(1) && f(2))
#define FIRST_BIT(m) ((m) & 1 -> 1 : ((m) & 2 -> 2 : 4))
#define IS_ZOMBIE(w) (ring[w] < base)
/* of the units in order, a block for each member */
#define DEFAULT(w, l) ((l) == 7 -> BIT(w) : ((l) == 3 -> (w == 0 -> 3 : 4) : ((l) == 5 -> (w == 0 -> 3 : 4) : \
                       ((l) == 6 -> (w == 1 -> 3 : 4) : ALL_UNITS))))
#ifdef OLD_ROOTS
#define OF_THIS(w, x) (sent_ring[x] != 0 && sent_op[x] == op[w])
#else
#define OF_THIS(w, x) (sent_ring[x] == ring[w] && sent_op[x] == op[w])
#endif
#define HEADER_OF(w, x) (!IN(x, list[ring[w]]) || OF_THIS(w, x))
#define SLICE_OF(w, x) (!IN(x, list[ring[w]]) || (slice_ring[x] == ring[w] && slice_op[x] == op[w]))
#define ALL_HEADERS(w) (HEADER_OF(w, 0) && HEADER_OF(w, 1) && HEADER_OF(w, 2))
#define ALL_SLICES(w) (SLICE_OF(w, 0) && SLICE_OF(w, 1) && SLICE_OF(w, 2))
#define ROOTS_OF(w, x) (IN(x, list[ring[w]]) -> sent_roots[x] : 0)
#define CARRIED(w, x) (!IN(x, list[ring[w]]) || carries[x])
#define TAKES_EFFECT(w) (ring[w] == 1 && base == 1 && FIRST_TOP == 2 && CARRIED(w, 0) && CARRIED(w, 1) && CARRIED(w, 2))
#define HAS_SENT(w) (sent_ring[w] == ring[w] && sent_op[w] == op[w])
#define HAS_SUMMED(w) (slice_ring[w] == ring[w] && slice_op[w] == op[w])
#define IS_AHEAD(w) (HAS_STATE(w) && op[w] == plan_op && ring[w] == base && kept[w])
#define AT_MOST_ONE_AHEAD(w, x) (!HAS_STATE(x) || IS_ZOMBIE(x) || IS_ZOMBIE(w) || op[w] <= op[x] + 1)
#define SERVES(w) (STEPS(w) && !HAS_SENT(w) && copied != op[w] && !lagging[w])
#define PAST_COPY(w) (HAS_STATE(w) && ring[w] == 2 && base == 1 && op[w] == copied + 1)
#define WENT_ON(w) (HAS_STATE(w) && op[w] > copied && !(ring[w] == 2 && base == 1))

inline obtain(w) {
  op[w] = op[w] + 1; phase[w] = ready;
  if :: op[w] > share_op[w] -> share[w] = 0; share_op[w] = 0 :: else fi;
  roots[w] = 0; todo[w] = 0; running[w] = 0; kept[w] = 1
}

proctype Worker(byte w) {
  do
  :: d_step { phase[w] == ready && op[w] < OPS ->                                       /* begin */
       phase[w] = collecting; running[w] = 0; roots[w] = 0;
#ifdef RESULT_FREED
       kept[w] = 0;
#endif
       if
       :: LEFT_RING(w) -> todo[w] = 0
       :: !LEFT_RING(w) && share[w] != 0 && share_op[w] == op[w] -> todo[w] = share[w] & ALL_UNITS
       :: else -> todo[w] = DEFAULT(w, list[ring[w]])
       fi }
  :: d_step { STEPS(w) && !lagging[w] && todo[w] != 0 && running[w] == 0 ->             /* start */
       running[w] = FIRST_BIT(todo[w]); todo[w] = todo[w] & ~running[w] }
  :: d_step { phase[w] == collecting && running[w] != 0 -> roots[w] = roots[w] | running[w]; running[w] = 0 }
  :: d_step { STEPS(w) && !lagging[w] && todo[w] == 0 && running[w] == 0 && !HAS_SENT(w) -> /* header */
       sent_ring[w] = ring[w]; sent_op[w] = op[w]; sent_roots[w] = roots[w];
       carries[w] = (w != 0 || copied == op[w]) }
  :: d_step { STEPS(w) && HAS_SENT(w) && ALL_HEADERS(w) && !HAS_SUMMED(w) ->            /* slice */
       assert((ROOTS_OF(w, 0) | ROOTS_OF(w, 1) | ROOTS_OF(w, 2)) == ALL_UNITS);         /* [sum] */
       assert((ROOTS_OF(w, 0) & ROOTS_OF(w, 1)) == 0);                                  /* [sum] */
       assert(((ROOTS_OF(w, 0) | ROOTS_OF(w, 1)) & ROOTS_OF(w, 2)) == 0);               /* [sum] */
       slice_ring[w] = ring[w]; slice_op[w] = op[w] }
  :: d_step { STEPS(w) && HAS_SUMMED(w) && ALL_SLICES(w) ->                             /* result */
       assert(ring[w] >= base || op[w] <= plan_op);                                     /* [fence] */
       obtain(w);
       if :: TAKES_EFFECT(w) -> ring[w] = 2 :: else fi;
       assert(AT_MOST_ONE_AHEAD(w, 0) && AT_MOST_ONE_AHEAD(w, 1) && AT_MOST_ONE_AHEAD(w, 2)) }  /* [one] */
  :: d_step { STEPS(w) && lagging[w] ->                                                 /* catch up */
       lagging[w] = 0; obtain(w) }
#ifdef STALE_REPORT
  :: d_step { quiescing && LIVES(w) && !IN(w, reports) ->        /* says where it stands, and leaves the ring later */
       said_op[w] = op[w]; said_roots[w] = roots[w]; reports = reports | BIT(w); silent = silent & ~BIT(w) }
#else
  :: d_step { quiescing && LIVES(w) && !IN(w, reports) ->                               /* report */
       promise[w] = number; reports = reports | BIT(w); silent = silent & ~BIT(w) }
#endif
  :: d_step { HAS_STATE(w) && ring[w] < base && promise[w] < base && IN(w, list[base]) ->   /* enter */
       ring[w] = base; lagging[w] = 0;
       share[w] = (plan_has_units -> NAMED | plan_units[w] : 0); share_op[w] = (plan_has_units -> plan_op : 0);
       if
       :: phase[w] == collecting && op[w] == plan_op ->
#ifdef RUNNING_IS_MOVED
          todo[w] = plan_units[w] & ~roots[w] & ~running[w]
#else
          if :: plan_has_units -> todo[w] = plan_units[w] :: else -> todo[w] = DEFAULT(w, list[base]) fi;
          roots[w] = roots[w] & todo[w]; running[w] = running[w] & todo[w];
          todo[w] = todo[w] & ~roots[w] & ~running[w]
#endif
       :: phase[w] == collecting && op[w] + 1 == plan_op ->
          lagging[w] = 1; roots[w] = 0; running[w] = 0; todo[w] = 0
       :: phase[w] == ready -> assert(op[w] == plan_op)                                  /* [plan] */
       :: else -> assert(0)                                                             /* [plan] */
       fi }
#ifdef JOIN
  :: atomic { w == c && phase[c] == fresh && promise[c] < 2 && (copied == NO_COPY || SOME(WENT_ON)) && SOME(SERVES) ->
       if :: SERVES(0) -> copied = op[0] :: SERVES(1) -> copied = op[1] fi }
  :: d_step { w == c && phase[c] == fresh && promise[c] < 2 && copied != NO_COPY && SOME(PAST_COPY) ->
       op[c] = copied + 1; phase[c] = ready; ring[c] = 2; kept[c] = 1; copied = NO_COPY }
#endif
  od
}

/* ---- the leader ---- */
#define DEAD_ONES ((phase[0] == dead) | (phase[1] == dead) << 1 | (phase[2] == dead) << 2)
#define IS_LISTED(w) (IN(w, list[base]) || IN(w, list[number]))
#define HAS_DEAD(w) (HAS_STATE(w) && ring[w] > promise[w] && ring[w] >= base && (list[ring[w]] & DEAD_ONES))
#ifdef ADOPTS_ABORTED
#define IS_STRANDED(w) 0
#else
#define IS_STRANDED(w) (HAS_STATE(w) && IS_LISTED(w) && promise[w] >= base && promise[w] >= ring[w])
#endif
#define NOT_ENTERED(w) (HAS_STATE(w) && IN(w, list[base]) && ring[w] < base && (list[base] & DEAD_ONES))
#define IS_WAITED_FOR(w) (IS_LISTED(w) && LIVES(w) && !IN(w, reports | silent))
#define IS_SETTLED(w) (!IS_LISTED(w) || !LIVES(w) || IN(w, reports | silent))
/* A newcomer that a loss has promised away is ended; here it only stops to be waited for. */
#define WAITS_FOR_PROMISED \
  (FIRST_TOP == 2 && base == 1 && phase[c] == fresh && promise[c] >= 2 && (ring[0] == 2 || ring[1] == 2))
/* A worker that has entered a later generation proves that all members of this ring were about to leave it. */
#define HAS_ENTERED_LATER(w, g) (IN(w, reports) && HAS_STATE(w) && ring[w] > g)
#define PROVEN(g) ((list[g] & (reports | DEAD_ONES)) || \
                   HAS_ENTERED_LATER(0, g) || HAS_ENTERED_LATER(1, g) || HAS_ENTERED_LATER(2, g))
#ifdef STALE_REPORT
#define SAID_OP(w) said_op[w]
#define SAID_ROOTS(w) said_roots[w]
#else
#define SAID_OP(w) op[w]
#define SAID_ROOTS(w) roots[w]
#endif
#ifdef APPLIED_ONLY
#define REDUCED(w) (SAID_OP(w) - (phase[w] == ready && SAID_OP(w) > 0))
#else
#define REDUCED(w) SAID_OP(w)
#endif

/* Each generation that may be in effect is proven to step no more; a newcomer's copy counts if nobody is silent. */
#define HOLDER_REPORTS(w) (IN(w, reports) && HAS_STATE(w) && IS_LISTED(w))
#ifdef NO_PROOF
#define MAY_DECIDE 1
#else
#define MAY_DECIDE (PROVEN(base) && PROVEN(number) && (SOME(HOLDER_REPORTS) || silent == 0))
#endif

proctype Leader() {
  byte x, chosen, covered, first, newest;
  bool proven;
  do
  :: d_step { !quiescing && !lost && (SOME(HAS_DEAD) || SOME(IS_STRANDED) || SOME(NOT_ENTERED)) ->
       quiescing = 1; reports = 0; silent = 0 }
  :: d_step { !quiescing && !lost && WAITS_FOR_PROMISED -> phase[c] = dead; copied = NO_COPY }
  :: d_step { !quiescing && !lost && quiesces > 0 -> quiesces--; quiescing = 1; reports = 0; silent = 0 }
  :: atomic { quiescing && silences > 0 && SOME(IS_WAITED_FOR) ->                       /* give up */
       silences--;
       if :: IS_WAITED_FOR(0) -> silent = silent | BIT(0)
          :: IS_WAITED_FOR(1) -> silent = silent | BIT(1)
          :: IS_WAITED_FOR(2) -> silent = silent | BIT(2)
       fi }
  :: d_step { quiescing && !lost && EVERY(IS_SETTLED) && MAY_DECIDE ->                  /* decide and commit */
       assert(number + 1 < RECORDS);
       newest = base; x = 0;
       do :: x < WORKERS -> if :: IN(x, reports) && HAS_STATE(x) && ring[x] > newest -> newest = ring[x] :: else fi; x++
          :: else -> break od;
       x = 0; chosen = 0;
       do :: x < WORKERS ->
             if :: IN(x, reports) && HAS_STATE(x) && IN(x, list[newest]) -> chosen = chosen | BIT(x) :: else fi; x++
          :: else -> break od;
       if
       :: chosen == 0 && phase[c] == fresh && IN(c, reports) && copied != NO_COPY ->    /* the only copy of the state */
          chosen = BIT(c); op[c] = copied; phase[c] = ready; copied = NO_COPY; kept[c] = 0
#ifdef STALE_REPORT
          ; said_op[c] = op[c]
#endif
       :: else
       fi;
       if
       :: chosen == 0 -> lost = 1
       :: else ->
          x = 0; plan_op = 0;
          do :: x < WORKERS -> if :: IN(x, chosen) && REDUCED(x) > plan_op -> plan_op = REDUCED(x) :: else fi; x++
             :: else -> break od;
          x = 0; covered = 0; first = NOBODY; plan_has_units = 0; proven = 0;
          do
          :: x < WORKERS ->
             plan_units[x] = 0;
             if
             :: IN(x, chosen) ->
                assert(REDUCED(x) + 1 >= plan_op);                                      /* [one] */
                if :: first == NOBODY -> first = x :: else fi;
                if :: REDUCED(x) == plan_op && kept[x] -> proven = 1 :: else fi;        /* here: a source is found */
                if
                :: REDUCED(x) == plan_op && phase[x] == collecting ->
                   plan_has_units = 1;
#ifdef RUNNING_IS_MOVED
                   plan_units[x] = SAID_ROOTS(x) & ~covered;
#else
                   plan_units[x] = (SAID_ROOTS(x) | running[x]) & ~covered;
#endif
                   covered = covered | plan_units[x]
                :: else
                fi
             :: else
             fi;
             x++
          :: else -> break
          od;
          x = 0;
          do :: x < WORKERS ->
                if :: IN(x, chosen) && REDUCED(x) < plan_op -> assert(proven) :: else fi; x++ /* [source] */
             :: else -> break od;
          if :: plan_has_units -> plan_units[first] = plan_units[first] | (ALL_UNITS & ~covered) :: else fi;
          number++; base = number; list[number] = chosen; quiescing = 0; reports = 0; silent = 0
       fi;
       x = 0; chosen = 0; covered = 0; first = 0; newest = 0; proven = 0 }
  od
}
/* ---- faults, each as often as its budget says, at any moment ---- */
proctype World() {
  byte x;
  do
  :: atomic { crashes > 0 ->
       if :: phase[0] != dead -> x = 0 :: phase[1] != dead -> x = 1 :: phase[2] != dead -> x = 2 fi;
       crashes--; phase[x] = dead; op[x] = 0; roots[x] = 0; todo[x] = 0; running[x] = 0; kept[x] = 0; lagging[x] = 0;
       ring[x] = 0; promise[x] = 0;
       if :: x == c -> copied = NO_COPY :: else fi; x = 0 }
  :: d_step { leaders > 0 -> leaders--; quiescing = 0; reports = 0; silent = 0 }
  od
}

#define HAS_DONE(w) (!HAS_STATE(w) || IS_ZOMBIE(w) || op[w] == OPS)
proctype Watch() { timeout -> assert(lost || EVERY(HAS_DONE)) }                         /* [stuck] */

init {
  byte x;
  atomic {
    list[1] = FIRST_LIST; list[2] = (FIRST_TOP == 2 -> 7 : 0);
    do
    :: x < WORKERS ->
       if :: IN(x, FIRST_LIST) -> phase[x] = ready; ring[x] = 1 :: else -> phase[x] = fresh fi;
       run Worker(x); x++
    :: else -> break
    od;
    x = 0;
    run Leader(); run World(); run Watch()
  }
}
