//! A whole log: lines paired into calls, in the order in which things began and ended.

use std::{
    collections::{BTreeMap, HashMap},
    path::Path,
};

use super::{
    call::{Call, Ret},
    decode,
    line::{self, Body},
};
use crate::replay::error::ReplayError;

/// Index into [`Log::calls`].
pub type CallId = usize;

/// A call of one task.
#[derive(Debug)]
pub struct CallRecord {
    /// The task.
    pub pid: u32,
    /// Its name in the log.
    pub name: String,
    /// Its arguments.
    pub call: Call,
    /// What it returned.
    pub ret: Ret,
    /// The line on which it begins, from 1.
    pub begin: u64,
    /// The line on which it ends; `None` if the log ends first.
    pub end: Option<u64>,
}

/// What happens on a line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// A call begins.
    Begin(CallId),
    /// A call ends.
    End(CallId),
    /// A task shows itself by a line that matters in no other way.
    Seen(u32),
    /// A task is gone.
    Gone(u32),
    /// The thread `by` did an execve and goes on as `pid`.
    Superseded {
        /// The pid from now on.
        pid: u32,
        /// The thread that did it.
        by: u32,
    },
}

/// A parsed log.
#[derive(Debug, Default)]
pub struct Log {
    /// All calls that are known, by the line on which they begin.
    pub calls: Vec<CallRecord>,
    /// Events with their lines.
    pub events: Vec<(u64, Event)>,
    /// Lines read.
    pub lines: u64,
    /// Calls that this tool doesn't know, by name.
    pub unknown_calls: BTreeMap<String, u64>,
    /// Lines that were passed over, by reason.
    pub skipped: BTreeMap<&'static str, u64>,
}

/// A call whose end hasn't come.
struct Open {
    name: String,
    args: String,
    begin: u64,
    event: usize,
    /// The place in `calls`, reserved when the call began.
    call: Option<CallId>,
}

impl Log {
    /// Parses the text of a log; `path` is for messages.
    ///
    /// # Errors
    /// A line that isn't one of strace's, or a known call whose arguments or result can't be read.
    pub fn parse(path: &Path, text: &str) -> Result<Log, ReplayError> {
        let mut builder = Builder::default();
        let mut number = 0;
        for raw in text.lines() {
            number += 1;
            if raw.trim().is_empty() {
                continue;
            }
            builder
                .line(number, raw)
                .map_err(|why| ReplayError::line(path, number, why))?;
        }
        if !text.is_empty() && !text.ends_with('\n') {
            return Err(ReplayError::line(
                path,
                number,
                "the last line has no end: the log is cut off",
            ));
        }
        builder.log.lines = number;
        builder
            .finish()
            .map_err(|(line, why)| ReplayError::line(path, line, why))
    }

    /// Whether the log has calls that open files: without them two descriptors of one path may be one file or two.
    pub fn follows_files(&self) -> bool {
        self.calls
            .iter()
            .any(|c| matches!(c.call, Call::Open { .. } | Call::Close { .. }))
    }
}

#[derive(Default)]
struct Builder {
    log: Log,
    open: HashMap<u32, Open>,
}

impl Builder {
    fn line(&mut self, number: u64, raw: &str) -> Result<(), String> {
        let line = line::parse(raw)?;
        // A log without pids is of a single task.
        let pid = line.pid.unwrap_or(0);
        match line.body {
            Body::Whole { name, args, ret } => {
                self.abandon(pid);
                self.whole(number, pid, name, args, ret)
            }
            Body::Begin { name, args } => {
                self.abandon(pid);
                self.begin(number, pid, name, args);
                Ok(())
            }
            Body::Resumed { name, rest } => self.resumed(number, pid, name, rest),
            Body::Exit => {
                self.event(number, Event::Gone(pid));
                Ok(())
            }
            Body::Superseded { by } => {
                self.event(number, Event::Superseded { pid, by });
                if let Some(open) = self.open.remove(&by) {
                    if let Some(id) = open.call {
                        self.log.calls[id].pid = pid;
                    }
                    self.open.insert(pid, open);
                }
                Ok(())
            }
            Body::Signal => {
                self.event(number, Event::Seen(pid));
                Ok(())
            }
            Body::Note => {
                self.skip("a note of strace itself");
                Ok(())
            }
        }
    }

    fn whole(
        &mut self,
        number: u64,
        pid: u32,
        name: &str,
        args: &str,
        ret: &str,
    ) -> Result<(), String> {
        let Some(call) = decode::call(name, args)? else {
            self.unknown(number, pid, name);
            return Ok(());
        };
        let ret = decode::ret(ret).map_err(|why| format!("{name}: {why}"))?;
        let id = self.log.calls.len();
        self.log.calls.push(CallRecord {
            pid,
            name: name.to_owned(),
            call,
            ret,
            begin: number,
            end: Some(number),
        });
        self.event(number, Event::Begin(id));
        self.event(number, Event::End(id));
        Ok(())
    }

    fn begin(&mut self, number: u64, pid: u32, name: &str, args: &str) {
        let known = decode::is_known(name);
        let call = known.then(|| {
            let id = self.log.calls.len();
            let (name, call) = (name.to_owned(), Call::Neutral);
            self.log.calls.push(CallRecord {
                pid,
                name,
                call,
                ret: Ret::Unknown,
                begin: number,
                end: None,
            });
            id
        });
        if !known {
            *self.log.unknown_calls.entry(name.to_owned()).or_default() += 1;
        }
        let event = self.log.events.len();
        self.event(number, call.map_or(Event::Seen(pid), Event::Begin));
        self.open.insert(
            pid,
            Open {
                name: name.to_owned(),
                args: args.to_owned(),
                begin: number,
                event,
                call,
            },
        );
    }

    fn resumed(&mut self, number: u64, pid: u32, name: &str, rest: &str) -> Result<(), String> {
        let Some(open) = self.open.remove(&pid) else {
            self.skip("resumed without its beginning");
            return Ok(());
        };
        if open.name != name {
            return Err(format!(
                "{name} resumed, but {} on line {} is what task {pid} was in",
                open.name, open.begin
            ));
        }
        let text = format!("{}{}", open.args, rest);
        let (args, result) = line::split_result(&text)?;
        let Some(id) = open.call else {
            self.event(number, Event::Seen(pid));
            return Ok(());
        };
        let call = decode::call(name, args)?.unwrap_or(Call::Neutral);
        let result = decode::ret(result).map_err(|why| format!("{name}: {why}"))?;
        let record = &mut self.log.calls[id];
        (record.call, record.ret, record.end) = (call, result, Some(number));
        self.event(number, Event::End(id));
        Ok(())
    }

    /// A task that begins something new while a call of its own is open: that call will not come back.
    fn abandon(&mut self, pid: u32) {
        if let Some(open) = self.open.remove(&pid) {
            self.skip("a call without its end");
            self.leave_open(&open);
        }
    }

    /// Decodes what is known of a call that never came back.
    fn leave_open(&mut self, open: &Open) {
        let Some(id) = open.call else { return };
        // exit() never comes back; of others some arguments may be missing, and then nothing is done for them.
        let call = decode::call(&open.name, &open.args).ok().flatten();
        self.log.calls[id].call = call.unwrap_or(Call::Neutral);
        debug_assert!(
            self.log
                .events
                .get(open.event)
                .is_some_and(|(_, e)| *e == Event::Begin(id))
        );
    }

    fn unknown(&mut self, number: u64, pid: u32, name: &str) {
        *self.log.unknown_calls.entry(name.to_owned()).or_default() += 1;
        self.event(number, Event::Seen(pid));
    }

    fn skip(&mut self, why: &'static str) {
        *self.log.skipped.entry(why).or_default() += 1;
    }

    fn event(&mut self, number: u64, event: Event) {
        self.log.events.push((number, event));
    }

    fn finish(mut self) -> Result<Log, (u64, String)> {
        let mut open: Vec<Open> = self.open.drain().map(|(_, open)| open).collect();
        open.sort_by_key(|o| o.begin);
        for o in open {
            self.leave_open(&o);
        }
        if self.log.calls.is_empty() {
            return Err((
                self.log.lines.max(1),
                "no call that matters in the whole log".into(),
            ));
        }
        Ok(self.log)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Log, String> {
        Log::parse(Path::new("t"), text).map_err(|e| e.to_string())
    }

    #[test]
    fn halves_are_paired_per_task() {
        let log = parse(
            "1 munmap(0x1000, 4096 <unfinished ...>\n2 brk(NULL <unfinished ...>\n2 <... brk resumed>) = 0x5000\n\
             1 <... munmap resumed>) = 0\n2 prlimit64(0, RLIMIT_STACK, NULL,  <unfinished ...>\n\
             2 <... prlimit64 resumed>{rlim_cur=8192*1024, rlim_max=RLIM64_INFINITY}) = 0\n",
        )
        .unwrap();
        let spans: Vec<_> = log.calls.iter().map(|c| (c.pid, c.begin, c.end)).collect();
        assert_eq!(spans, [(1, 1, Some(4)), (2, 2, Some(3)), (2, 5, Some(6))]);
        let events: Vec<_> = log.events.iter().map(|e| e.1).collect();
        assert_eq!(
            events,
            [
                Event::Begin(0),
                Event::Begin(1),
                Event::End(1),
                Event::End(0),
                Event::Begin(2),
                Event::End(2)
            ]
        );
        assert_eq!(
            log.calls[2].call,
            Call::Rlimit {
                resource: 3,
                soft: None
            }
        );
    }

    #[test]
    fn halves_without_the_other_are_counted() {
        let log = parse("1 <... munmap resumed>) = 0\n1 munmap(0x1000, 1 <unfinished ...>\n1 brk(NULL) = 0x5000\n").unwrap();
        assert_eq!(log.skipped["resumed without its beginning"], 1);
        assert_eq!(log.skipped["a call without its end"], 1);
        assert_eq!(log.calls.len(), 2);
    }

    #[test]
    fn an_execve_of_a_thread_goes_on_under_the_pid_of_the_process() {
        let log = parse(
            "7 execve(\"/a\", [\"a\"], 0x1 /* 1 var */ <unfinished ...>\n5 +++ superseded by execve in pid 7 +++\n\
             5 <... execve resumed>) = 0\n",
        )
        .unwrap();
        assert_eq!((log.calls[0].pid, log.calls[0].end), (5, Some(3)));
    }

    #[test]
    fn damage_is_an_error_with_its_line() {
        for (text, why) in [
            (
                "1 brk(NULL) = 0x1000\n1 brk(NULL",
                "t:2: no closing parenthesis: the line is cut off",
            ),
            (
                "1 brk(NULL) = 0x1000\n1 brk(NULL) = 0x10",
                "t:2: the last line has no end: the log is cut off",
            ),
            (
                "1 brk(NULL) = 0x10zz\n",
                "t:1: brk: no result of a call: \"0x10zz\"",
            ),
            (
                "1 brk(0xq) = 0x1000\n",
                "t:1: brk: argument 1: \"0xq\" is neither a number nor a constant known here",
            ),
            (
                "1 brk(NULL <unfinished ...>\n1 <... mmap resumed>) = 0\n",
                "t:2: mmap resumed, but brk on line 1 is what task 1 was in",
            ),
            ("\u{1}\u{2}\n", "t:1: no line of strace: \"\\u{1}\\u{2}\""),
            ("", "t:1: no call that matters in the whole log"),
            (
                "1 +++ exited with 0 +++\n",
                "t:1: no call that matters in the whole log",
            ),
        ] {
            assert_eq!(parse(text).unwrap_err(), why);
        }
    }

    #[test]
    fn calls_that_are_not_known_are_counted() {
        let log = parse("1 read(3, \"a)b\", 3) = 3\n1 read(3,  <unfinished ...>\n1 <... read resumed>\"x\", 1) = 1\n1 brk(NULL) = 0x1\n").unwrap();
        assert_eq!(log.unknown_calls["read"], 2);
        assert_eq!(log.calls.len(), 1);
    }
}
