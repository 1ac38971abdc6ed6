/* The store as the fence: one record for each number, written by nobody but the present leader.
 *
 * Two replicas of the rendezvous service, one store, two workers. A replica may lose the election at any moment and
 * hear of it late or never; it is paused wherever it stands still here, and wakes up wherever it goes on. The answer to
 * a transaction may be lost. Orders are delivered late, in any order, and more than once.
 *
 *   here                                   there
 *   Replica: elected, read                 elastic/store/election.py; formation.py elected
 *   Replica: commit                        elastic/protocol/membership/transitions.py commit; the transaction in elastic/records/ledger.py
 *   Replica: answer, lost answer           state_machine.py committed, CommitRefused; read before anything is told
 *   Replica: tell                          transitions.py publish
 *   Worker                                 orders of an older term are refused; generation_change.py enter_loss
 *
 * Claims: a record never changes once it is written [once]; nobody writes with a term that is over [term]; a worker
 * enters only what is written, so no two enter different lists of one number [same]; the numbers that a worker enters
 * only grow [grow].
 *
 * Sizes: TERMS, NUMBERS. Planted faults: NO_TERM_COMPARED NO_NUMBER_COMPARED TELLS_UNREAD
 */
#ifndef TERMS
#define TERMS 3
#endif
#ifndef NUMBERS
#define NUMBERS 3
#endif
#define REPLICAS 2
#define WORKERS 2
#define ORDERS (REPLICAS * (NUMBERS + 1))

mtype:stage = { follower, idle, waiting, unsure, telling };

/* the store */
byte term, key_of = REPLICAS, top, written[NUMBERS + 1], written_by[NUMBERS + 1];

/* replicas */
mtype:stage stage[REPLICAS];
byte my_term[REPLICAS], my_top[REPLICAS], my_list[REPLICAS];

/* orders on their way: of each replica and number, the list and the term; they are never lost or used up */
byte order_list[ORDERS], order_term[ORDERS];
#define ORDER(r, number) ((r) * (NUMBERS + 1) + (number))

byte seen_term[WORKERS], entered[WORKERS], entered_list[WORKERS];

#ifdef NO_TERM_COMPARED
#define TERM_HOLDS(r) 1
#else
#define TERM_HOLDS(r) (key_of == r && term == my_term[r])
#endif
#ifdef NO_NUMBER_COMPARED
#define NUMBER_HOLDS(r) 1
#else
#define NUMBER_HOLDS(r) (top == my_top[r])
#endif

#define IS_MINE(r) (written[my_top[r] + 1] == my_list[r] && written_by[my_top[r] + 1] == my_term[r])

proctype Replica(byte r) {
  byte number;
  do
  :: d_step { key_of == REPLICAS && term < TERMS ->                        /* elected: reads what is written */
       term++; key_of = r; my_term[r] = term; my_top[r] = top; my_list[r] = written[top];
       stage[r] = (top -> telling : idle) }
  :: atomic { stage[r] == idle && my_top[r] < NUMBERS ->                   /* decides, and asks the store */
       if :: my_list[r] = 1 :: my_list[r] = 2 :: my_list[r] = 3 fi;
       stage[r] = waiting }
  :: d_step { stage[r] == waiting ->                                                    /* the transaction */
       number = my_top[r] + 1;
       if
       :: TERM_HOLDS(r) && NUMBER_HOLDS(r) ->
          assert(written[number] == 0);                                                 /* [once] */
          assert(key_of == r && term == my_term[r]);                                    /* [term] */
          written[number] = my_list[r]; written_by[number] = my_term[r]; top = number;
          stage[r] = unsure
       :: else -> stage[r] = unsure
       fi;
       number = 0 }
  :: d_step { stage[r] == unsure && IS_MINE(r) ->
       my_top[r] = my_top[r] + 1; stage[r] = telling }                     /* answered, or read afterwards */
  :: d_step { stage[r] == unsure && !IS_MINE(r) ->
#ifdef TELLS_UNREAD
       my_top[r] = my_top[r] + 1; stage[r] = telling
#else
       stage[r] = follower; my_list[r] = 0; my_top[r] = 0; my_term[r] = 0
#endif
     }
  :: stage[r] == unsure -> stage[r] = waiting                                           /* no answer: once more */
  :: d_step { stage[r] == telling ->
       order_list[ORDER(r, my_top[r])] = my_list[r]; order_term[ORDER(r, my_top[r])] = my_term[r]; stage[r] = idle }
  :: d_step { key_of == r -> key_of = REPLICAS }                           /* its lease ends; it does not know */
  od
}

#define IS_IN(w, list) (((list) >> (w)) & 1)

proctype Worker(byte w) {
  byte x;
  do
  :: atomic {
       if
       :: order_list[ORDER(0, 1)] -> x = ORDER(0, 1) :: order_list[ORDER(0, 2)] -> x = ORDER(0, 2)
       :: order_list[ORDER(0, 3)] -> x = ORDER(0, 3) :: order_list[ORDER(1, 1)] -> x = ORDER(1, 1)
       :: order_list[ORDER(1, 2)] -> x = ORDER(1, 2) :: order_list[ORDER(1, 3)] -> x = ORDER(1, 3)
       fi;
       d_step {
         if
         :: order_term[x] >= seen_term[w] && x % (NUMBERS + 1) > entered[w] && IS_IN(w, order_list[x]) ->
            assert(written[x % (NUMBERS + 1)] == order_list[x]);                        /* [same] */
            seen_term[w] = order_term[x]; entered[w] = x % (NUMBERS + 1); entered_list[w] = order_list[x]
         :: else
         fi;
         assert(entered[0] != entered[1] || entered_list[0] == entered_list[1]);        /* [same] */
         x = 0 } }
  od
}

init {
  atomic {
    stage[0] = follower; stage[1] = follower;
    run Replica(0); run Replica(1); run Worker(0); run Worker(1)
  }
}
